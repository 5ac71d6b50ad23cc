"""Pattern rewrites before attention is matched: matches become plain attention, and are put back where useless.

Three kinds, in this order: rules of onnxscript, operators of other domains by their definitions, formulas by their meaning
(`rewrites`). Each rewrite is built beside the old nodes, verified, and connected
(`undoable_rewrite`). The old nodes are kept until the result of the new ones is known.
"""
