"""Every form of every fused operator on an execution provider that is installed here, held against its reference.

    table = run(find("cpu"))

`cases.py` lists the forms of an operator to try, and makes a node of a form, a model of it and one of its body; `child.py` runs
both in a process that may die, and `run.py` judges.
"""
