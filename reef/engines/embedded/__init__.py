"""A small inference server for CPUs that answers SGLang's native HTTP API: `python -m reef.engines.embedded`.

Tokens in, tokens out. It exists so that Reef runs on a laptop with the client, the routes and the errors it has on a
GPU machine. It knows nothing of Reef: no receipts, no scenarios, no training.

    __main__.py      the command: arguments, start, stop
    architecture.py  config.json -> the numbers a forward pass needs; refuses what it cannot run
    weights.py       safetensors -> checked, fused tensors
    cache.py         keys and values of the running rows: one rectangle
    model.py         the forward pass: prefill and one-token decode
    prefill.py       admitted prompts in chunks, equal ones once
    params.py        sampling parameters: parsed and checked
    sampling.py      logits -> tokens and log-probabilities, for all rows at once
    shaping.py       penalties, logit bias, min_new_tokens, for the few rows that ask
    text.py          tokenizer, stop strings
    request.py       one sequence from arrival to its finish reason
    rows.py          the running requests as columns of arrays
    scheduler.py     admit, prefill, decode, finish; pause, abort, load
    engine.py        the generation thread around the scheduler
    wire.py          JSON bodies <-> requests
    answers.py       where the snapshots of one call are collected
    http.py          bodies, errors and the key, as every route has them
    server.py        routes
    receive.py       weights over a process group: groups, what has come so far
    updates.py       its routes
    process.py       socket, port file, signals, the parent's death
"""
