"""Every form of every fused operator on an execution provider that is installed here, held against its reference.

    table = run(find("cpu"))

`forms.py` lists the forms of an operator to try; `inputs.py` makes a node of a form, `decomposed.py` the same attention
of MatMul and Softmax; `child.py` runs both in a process that may die, and `run.py` judges.
"""
