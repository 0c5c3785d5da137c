"""Prompts on both sides, equal or nearly."""

import json
from pathlib import Path

import pytest
from reef_harness.cli import main
from reef_harness.evaluation.contamination import COMMON, PAIRS, SHOWN, Overlap, normal, overlaps, text_of

LONG = " ".join(f"word{i}" for i in range(20))  # 8 n-grams of 13 words


def test_prompts_are_compared_without_case_spaces_punctuation_and_unicode_forms() -> None:
    assert normal("  Start at\t9.\nSubtract 4!") == normal("start AT 9 subtract 4") == "start at 9 subtract 4"
    assert normal("ﬁne ４２") == "fine 42"
    assert normal("3-4") == normal("3 - 4") != normal("3 4")
    assert normal("1.5 apples") != normal("1 5 apples")
    assert normal("?!") == "?!"  # nothing is left: the text itself, so that not all such are equal


def test_an_equal_prompt_is_found_in_whatever_form() -> None:
    [found] = overlaps([("t1", "What is 2+2?"), ("t2", "What is 2-2?")], [("h", "what is 2 + 2"), ("g", "who?")])
    assert (found.held_out, found.exact, found.num_exact, found.near) == ("h", ("t1",), 1, ())


def test_the_share_of_common_n_grams_is_counted_from_the_held_out_side() -> None:
    """The first 16 of 20 words: 4 of the held-out prompt's 8 n-grams."""
    part = " ".join(LONG.split()[:16])
    [found] = overlaps([("t", f"before it {part} and after it")], [("h", LONG)])
    assert (found.num_exact, found.near) == (0, ((0.5, "t"),))
    assert overlaps([("t", part)], [("h", LONG)], at_least=0.51) == []


def test_a_short_prompt_is_found_inside_a_long_one_by_its_characters() -> None:
    short = "how many primes are there below 100?"
    [found] = overlaps([("t", f"{LONG}. Now, {short} {LONG}")], [("h", short)])
    assert found.near == ((1.0, "t"),)


def test_what_all_held_out_prompts_share_names_no_pair() -> None:
    held_out = [(f"h{i}", f"{LONG} number {i}") for i in range(COMMON + 1)]
    found = overlaps([("t", LONG)], held_out)
    assert found == []
    assert len(overlaps([("t", LONG)], held_out[:COMMON])) == COMMON


def test_the_closest_pairs_are_kept_and_all_are_counted() -> None:
    words = LONG.split()
    train = [(f"t{n}", " ".join(words[:n])) for n in range(13, 20) for _ in range(5)]
    [found] = overlaps(train, [("h", LONG)], at_least=0.1)
    assert (len(found.near), found.num_near) == (PAIRS, 35)
    assert found.near[0] == (7 / 8, "t19") and found.near[-1] == (6 / 8, "t18")
    [found] = overlaps([(f"t{i}", LONG) for i in range(99)], [("h", LONG)])
    assert (len(found.exact), found.num_exact) == (PAIRS, 99)


def rows(path: Path, *prompts: str) -> str:
    path.write_text("".join(json.dumps({"id": f"{path.stem}{i}", "prompt": p}) + "\n" for i, p in enumerate(prompts)))
    return str(path)


def test_the_command_fails_where_a_held_out_prompt_is_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = rows(tmp_path / "h.jsonl", "What is 2+2?", LONG)
    assert main(["contamination", rows(tmp_path / "clean.jsonl", "Something else"), held_out]) == 0
    assert "of 2 held-out prompts 0 are in" in capsys.readouterr().out
    assert main(["contamination", rows(tmp_path / "near.jsonl", f"{LONG} more"), held_out]) == 0
    said = capsys.readouterr().out
    assert "| shared | held out | trained on |" in said and "| 1.00   | h1       | near0      |" in said
    assert main(["contamination", rows(tmp_path / "same.jsonl", "x", "what is 2 + 2"), held_out]) == 1
    assert "| exact  | h0       | same1      |" in capsys.readouterr().out


def test_twenty_pairs_are_printed_and_a_file_has_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """30 held-out prompts and as many that equal them; 12 more equal the first, of which 10 are kept."""
    prompts = [f"What is {n} and {n}?" for n in range(30)]
    held_out = rows(tmp_path / "h.jsonl", *prompts)
    train, out = rows(tmp_path / "t.jsonl", *prompts, *[prompts[0]] * 12), tmp_path / "pairs.jsonl"
    assert main(["contamination", train, held_out]) == 1
    said = capsys.readouterr().out
    assert said.count("| exact  |") == SHOWN == 20
    assert "\nand 19 more: --out FILE has all\n" in said
    assert "\n3 other pairs not listed: for a held-out prompt the closest 10 of each kind are.\n" in said
    assert main(["contamination", train, held_out, "--out", str(out)]) == 1
    assert f"\nand 19 more in {out}\n" in capsys.readouterr().out
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert (len(kept), sum(len(each["exact"]) for each in kept), kept[0]["num_exact"]) == (30, 39, 13)


def test_a_long_name_ends_in_an_ellipsis() -> None:
    name = "a name that goes on and on " * 9
    assert f"| {name[:59]}… |" in text_of([Overlap(name, ("t",), 1, (), 0)])


def test_half_a_file_proves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = rows(tmp_path / "h.jsonl", "What is 2+2?")
    (tmp_path / "train.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n{"text": "no prompt"}\n')
    assert main(["contamination", str(tmp_path / "train.jsonl"), held_out]) == 1
    assert "train.jsonl:2: no prompt" in capsys.readouterr().err
    assert main(["contamination", str(tmp_path / "train.jsonl"), held_out, "--at-least", "0"]) == 1
    assert main(["contamination", held_out, str(tmp_path / "absent.jsonl")]) == 1


def test_held_out_prompts_of_one_name_are_two_prompts() -> None:
    """The training prompt has 4 of the 8 n-grams of the first, and none of the second, which has 8 of its own."""
    other = " ".join(f"other{i}" for i in range(20))
    [found] = overlaps([("t", " ".join(LONG.split()[:16]))], [("h", LONG), ("h", other)])
    assert (found.held_out, found.near) == ("h", ((0.5, "t"),))
    both = overlaps([("t", LONG), ("u", other)], [("h", LONG), ("h", other)])
    assert [(each.held_out, each.exact) for each in both] == [("h", ("t",)), ("h", ("u",))]
