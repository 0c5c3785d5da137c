#!/bin/bash
# The whole example in order: items, service, before, trials, stream, after, figures, a page.
#
#   run.sh --train FILE --held-out FILE [--config serve-30b.yaml] [--releases 100]   # on GPUs; not run on GPUs by us
#   run.sh --cpu                                                                     # the same scripts, on the starter
#
# FILE is .jsonl or .csv with the columns problem and answer, or those that --problem, --answer and --id name. With
# --url a service that runs already is used (its key: REEF_API_KEY, or --key-file). Everything goes to --out, and the
# same command goes on where it stopped.
# Also: --samples, --rollouts, --max-tokens, --parts, --environment, --harbor-python.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
from=$PWD
cd "$here/../../../.."
there() { [[ $1 == /* ]] && echo "$1" || echo "$from/$1"; } # a path that was given from where we were called
python=${PYTHON:-.venv/bin/python}
package=recipes.sao.examples.imo_answerbench

cpu='' config='' out='' url='' key_file='' train='' held_out='' problem=problem answer=answer id=''
releases='' parts=4 samples='' rollouts=6 max_tokens='' environment='' harbor_python=.venv-harbor/bin/python
while (($#)); do
    [[ $1 == --cpu || $1 == --help || $1 == -h ]] || (($# > 1)) || { echo "run.sh: $1 needs a value" >&2; exit 2; }
    case $1 in
        --cpu) cpu=1; shift; continue ;;
        --help | -h) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        --config) if [[ $2 == */* ]]; then config=$(there "$2"); else config=$here/$2; fi ;;
        --out) out=$(there "$2") ;; --url) url=$2 ;; --key-file) key_file=$(there "$2") ;;
        --train) train=$(there "$2") ;; --held-out) held_out=$(there "$2") ;;
        --problem) problem=$2 ;; --answer) answer=$2 ;; --id) id=$2 ;;
        --releases) releases=$2 ;; --parts) parts=$2 ;; --samples) samples=$2 ;;
        --rollouts) rollouts=$2 ;; --max-tokens) max_tokens=$2 ;;
        --environment) environment=$2 ;; --harbor-python) harbor_python=$(there "$2") ;;
        *) echo "run.sh: unknown option $1 (--help)" >&2; exit 2 ;;
    esac
    shift 2
done

if [[ $cpu ]]; then # arithmetic in the place of olympiad problems, written as the starter writes it
    config=${config:-$here/serve-cpu.yaml} out=${out:-work/imo-answerbench-cpu} releases=${releases:-24}
    samples=${samples:-4}
    max_tokens=${max_tokens:-64} environment=${environment:-hostdir} grader=final ask='' at_least=1
    source=arithmetic in_flight=16 what='arithmetic, the starter model'
else
    config=${config:-$here/serve.yaml} out=${out:-work/imo-answerbench} releases=${releases:-100}
    samples=${samples:-16}
    max_tokens=${max_tokens:-7168} environment=${environment:-docker} grader=boxed
    ask=$'\n\nPut the final answer in \\boxed{}.' at_least=0.5 in_flight=64 what='our held-out items'
    [[ $train && $held_out ]] || { echo 'run.sh: --train FILE and --held-out FILE, or --cpu' >&2; exit 2; }
fi
for file in "$train" "$held_out"; do
    [[ ! $file || -r $file ]] || { echo "run.sh: cannot read $file" >&2; exit 2; }
done
mkdir -p "$out"
step() { printf '\n== %s\n' "$*"; }
of() { printf '%s, sha256 %s' "$(basename "$1")" "$(sha256sum "$1" | cut -c1-12)"; }

step 'problems -> items'
if [[ $cpu && ! ($train && $held_out) ]]; then
    "$python" -m recipes.arithmetic.export_items --out "$out/problems"
    train=$out/problems/train.jsonl held_out=$out/problems/in-domain.jsonl problem=prompt answer=gold
fi
export_items() { # FILE SPLIT OPTIONS
    local file=$1 split=$2
    shift 2
    "$python" -m $package.export_problems "$file" --out "$out/$split.jsonl" --split "$split" --grader $grader \
        --problem "$problem" --answer "$answer" ${id:+--id "$id"} --ask "$ask" \
        --source "${source:-$(basename "$file")}" --revision "$(of "$file")" "$@"
}
export_items "$held_out" held-out
export_items "$train" train --held-out "$out/held-out.jsonl" --at-least $at_least

if [[ ! $url ]]; then
    step "reef serve -c $config (log: $out/serve.log)"
    run_dir=$out/run key_file=$out/run/api-key
    started=$(mktemp)
    (umask 077 && : > "$out/serve.log") # the service prints its key when it makes one
    set -m # a process group of its own: a Ctrl-C beside the INT of stop() would be its second, "stop at once"
    "$python" -m reef serve -c "$config" --reef.run-dir "$run_dir" --reef.port 0 >> "$out/serve.log" 2>&1 &
    service=$!
    set +m
    stop() { rm -f "$started"; kill -INT $service 2> /dev/null && wait $service || true; }
    trap stop EXIT
    trap 'exit 130' INT TERM
    until [[ $url ]] && curl -sf -o /dev/null "$url/readyz"; do
        kill -0 $service 2> /dev/null || { echo 'the service ended:' >&2; tail -5 "$out/serve.log" >&2; exit 1; }
        sleep 0.5
        if [[ $run_dir/service.json -nt $started ]]; then
            url=$(sed -n 's/.*"url": *"\([^"]*\)".*/\1/p' "$run_dir/service.json")
        fi
    done
    echo "ready at $url"
fi
at=(--url "$url" ${key_file:+--key-file "$key_file"})

evaluate() {
    "$python" -m $package.evaluate "${at[@]}" --items "$out/held-out.jsonl" --out "$out/evaluation" --grader $grader \
        --samples "$samples" --max-tokens "$max_tokens"
}
stream() { # RELEASES
    "$python" -m $package.stream "${at[@]}" --items "$out/train.jsonl" --out "$out/stream" --grader $grader \
        --max-tokens "$max_tokens" --in-flight $in_flight --releases "$1"
}
trials() {
    "$python" -m $package.run "${at[@]}" --tasks "$tasks" --out "$out/trials" --rollouts "$rollouts" \
        --environment "$environment" --python "$harbor_python" --max-tokens "$max_tokens" "$@"
}

step 'held-out accuracy, before'
if compgen -G "$out/evaluation/*/summary.json" > /dev/null; then echo 'measured in an earlier run'; else evaluate; fi

step 'the problems in order, as Harbor trials'
tasks=$here/tasks
if [[ $cpu ]]; then
    tasks=$out/tasks
    "$python" -m $package.write_tasks --items "$out/train.jsonl" --first 3 --form final --out "$tasks" > /dev/null
fi
ran=''
if [[ -x $harbor_python ]]; then
    trials && ran=1 || echo 'not every trial has its verdict reported; on with the rest' >&2
else
    echo "left out: Harbor needs Python 3.12, and $harbor_python is not there (make harbor makes it)"
fi

for ((part = 1; part <= parts; part++)); do
    target=$((releases * part / parts))
    step "single rollouts, until they have trained $target releases"
    stream $target
    step "held-out accuracy, after $target"
    evaluate
done

if [[ $ran ]]; then
    step 'what became of the trials'
    trials --states || true
fi

step 'figures'
"$python" -m $package.plot_stream "$out/stream"
"$python" -m $package.plot_curve "$out/evaluation"
"$python" -m $package.plot_paper "$out/evaluation" --what "$what"

step 'a page about the run'
"$python" -m reef_harness report "${at[@]}" --records "$out/stream/rollouts.jsonl" --out "$out/report"
