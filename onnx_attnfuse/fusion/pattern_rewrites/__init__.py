"""Pattern rewrites before attention is matched: matches become plain attention, and are put back where useless.

Three kinds, in this order: rules of onnxscript (`onnxscript_rules`), operators of other domains by their definitions
(`custom_ops`), formulas by what they mean (`equations`). Each rewrite is built beside the old nodes, verified, and connected
(`undoable_rewrite`). The old nodes are kept until it is known what became of the new ones.
"""
