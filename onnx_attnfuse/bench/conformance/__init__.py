"""Every form of every fused operator on an execution provider that is installed here, held against its reference.

    table = run(find("cpu"))

`forms.py` lists the forms of an operator to try, `cases.py` makes a node of a form, `models.py` a model of it and one of its
body; `child.py` runs both in a process that may die, and `run.py` judges.
"""
