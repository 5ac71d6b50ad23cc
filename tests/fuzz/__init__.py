"""A fuzzer: attention graphs that nobody wrote, each judged before and after the library changed it.

    make fuzz N=100000 SEED=1 JOBS=2 VERIFY=both
    python -m tests.fuzz --recipe '{"masks": [{"kind": "window"}]}'    # one graph, as failures are printed

A seed becomes a `Recipe` (`recipe`), named choices only; a recipe becomes a model and inputs (`model`, `feeds`), always the same.
`journeys` says what is done to the model, `judging` whether the result is what the model computed, `pool` keeps worker processes
and notices those that die or hang, and `shrinking` makes recipes of failures as simple as they can be.
"""
