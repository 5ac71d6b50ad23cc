"""PyTorch's `multi_head_attention_forward`, which Dynamo keeps as one call, opened into the operators that it is made of."""

from __future__ import annotations

import contextlib
import importlib
import logging
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

_LOG = logging.getLogger(__name__)
_map: Any = importlib.import_module("torch.fx.node").map_arg
_CALL: Any = torch.nn.functional.multi_head_attention_forward


def open_calls(module: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Opens every call in a captured graph, in place, without unused weights; a call that cannot be opened stays.

    Args:
        module: The graph.
        mode: The mode of its fake tensors.
    """
    for node in [node for node in module.graph.nodes if node.op == "call_function" and node.target is _CALL]:
        try:
            inside = _traced(node, mode)
        except Exception:  # noqa: BLE001 - the call is right as it is
            _LOG.debug("'%s' is not opened", node.name, exc_info=True)
            continue
        getters = all(user.target is operator.getitem for user in node.users)
        if getters and not any(item.op == "get_attr" for item in inside.nodes):
            _put(module.graph, node, inside)


def _traced(node: fx.Node, mode: FakeTensorMode) -> fx.Graph:
    """The operators of a call, with a placeholder for each node that it takes."""
    taken = node.all_input_nodes

    def call(*given: Any) -> Any:
        values: Mapping[fx.Node, Any] = dict(zip(taken, given, strict=True))

        def of(item: fx.Node) -> Any:
            return values[item]

        return _CALL(*_map(node.args, of), **_map(node.kwargs, of))

    with mode, contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        return make_fx(call, pre_dispatch=True)(*(item.meta["example_value"] for item in taken)).graph


def _put(graph: fx.Graph, node: fx.Node, inside: fx.Graph) -> None:
    """Puts operators into the place of a call."""
    values: dict[fx.Node, fx.Node] = {}
    places = [item for item in inside.nodes if item.op == "placeholder"]
    values.update(zip(places, node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        results: Any = graph.graph_copy(inside, values)
    made = [values[item] for item in inside.nodes if item.op == "call_function"]
    for item in made:
        item.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    for user in list(node.users):
        new = results[user.args[1]]
        if isinstance(new, fx.Node):
            new.meta["example_value"] = user.meta.get("example_value")
            user.replace_all_uses_with(new, propagate_meta=False)
            graph.erase_node(user)
    if not node.users:
        graph.erase_node(node)
    for item in reversed(made):
        if not item.users:
            graph.erase_node(item)
