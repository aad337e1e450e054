"""A call on aligned inputs as a `torch.library` operator: shapes for tracing, gradients, operation counts."""

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.custom_op import custom_op, nothing_looks_on, refuse_tangents
from polysketch.ops.linear.backends import BACKENDS, Backend
from polysketch.ops.linear.packing import expanded_size
from polysketch.ops.linear.types import Diagonal, Inputs, Outputs, Plan
from polysketch.ops.operation_counts import counts_operations_of

_TENSORS = len(Inputs._fields)
# What `Inputs`, `Plan` and the name of a backend are to PyTorch, in their order.
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? local_query, Tensor? local_key, Tensor? log_decay, "
    "Tensor? sums, Tensor? normalizer, Tensor? length, "
    "int power, int factors, bool causal, float offset, bool normalize, int degree, int chunk, int diagonal, "
    "bool return_sums, str backend"
)


def run(inputs: Inputs, plan: Plan, backend: Backend) -> Outputs:
    """What the backend gives for aligned inputs; differentiable in all of them but the length."""
    if nothing_looks_on(*inputs):  # an operator's call takes as long as a hundred tokens
        refuse_tangents("linear_attention", *inputs)
        return backend.forward(inputs, plan)
    return Outputs(*linear_attention_operator(*inputs, *plan, backend.name))


def fold(inputs: Inputs, plan: Plan, backend: Backend) -> tuple[Tensor, Tensor]:
    """Sums and normalizer of the keys and values of aligned inputs: a call that has no query and reads nothing.

    Chunks are the plan's; tokens up to `inputs.length` are folded, all of them where it is None.
    """
    keys = inputs._replace(query=inputs.query[:, :, :0], local_query=None, local_key=None)
    found = run(keys, plan._replace(causal=False, return_sums=True), backend)
    return found.sums, found.normalizer


def _unpacked(arguments) -> tuple[Inputs, Plan, Backend]:
    return Inputs(*arguments[:_TENSORS]), Plan(*arguments[_TENSORS:-1]), BACKENDS[arguments[-1]]


@custom_op("polysketch::linear_attention", f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)")
def linear_attention_operator(*arguments):
    """A backend's forward on aligned inputs: (output, denominator, sums, normalizer), both last empty unless asked."""
    inputs, plan, backend = _unpacked(arguments)
    with without_autocast(inputs.query.device.type):
        return tuple(backend.forward(inputs, plan))


@linear_attention_operator.register_fake
def _(*arguments):
    inputs, plan, _ = _unpacked(arguments)
    return tuple(Outputs.empty(inputs, plan))


@custom_op("polysketch::linear_attention_backward", f"(Tensor[] gradients, Tensor[] outputs, {_ARGUMENTS}) -> Tensor[]")
def linear_attention_backward_operator(gradients, outputs, *arguments):
    """A backend's backward: gradients of query, key, value and, in order, of those optional tensors that are given."""
    inputs, plan, backend = _unpacked(arguments)
    outputs, upstream = Outputs(*outputs), Outputs(*gradients)
    with without_autocast(inputs.query.device.type):
        found = backend.backward(inputs, plan, outputs, upstream)
        if inputs.log_decay is not None:
            found["log_decay"] = _decay_gradient(inputs, plan, outputs, upstream, found)
    return [found[name].to(tensor.dtype) for name, tensor in inputs.differentiable().items()]


@linear_attention_backward_operator.register_fake
def _(gradients, outputs, *arguments):
    given = Inputs(*arguments[:_TENSORS]).differentiable()
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in given.values()]


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.options = inputs[_TENSORS:]


def _backward(ctx, *gradients):
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes them at each look
    inputs, outputs = Inputs(*saved[:_TENSORS]), saved[_TENSORS:]
    results = linear_attention_backward_operator(
        [gradient.contiguous() for gradient in gradients], list(outputs), *inputs, *ctx.options
    )
    by_name = dict(zip(inputs.differentiable(), results, strict=True))
    return *(by_name.get(name) for name in Inputs._fields), *(None for _ in ctx.options)


linear_attention_operator.register_autograd(_backward, setup_context=_setup_context)


def _decay_gradient(
    inputs: Inputs, plan: Plan, outputs: Outputs, upstream: Outputs, gradients: dict[str, Tensor]
) -> Tensor:
    """(batch, key_heads, L), from gradients already known: the same for every backend.

    With c the running total of log_decay, a sketched weight is homogeneous of degree power * factors in its query and
    in its key and proportional to exp(c_i - c_j), so dc_t = (q_t . dq_t - k_t . dk_t) / (power * factors); what leaves
    through the final sums is proportional to exp(c) at their boundary.
    """
    accumulate = gradients["query"].dtype
    shared = inputs.query.shape[1] // inputs.key.shape[1]
    of_query = (inputs.query.to(accumulate) * gradients["query"]).sum(-1).unflatten(1, (-1, shared)).sum(2)
    of_query = of_query if plan.causal else 0.0  # keys are only added up: nothing reads them from inside the sequence
    of_key = (inputs.key.to(accumulate) * gradients["key"]).sum(-1)
    gradient = ((of_query - of_key) / (plan.power * plan.factors)).flip(-1).cumsum(-1).flip(-1)
    if not plan.return_sums:
        return gradient
    leaving = (upstream.sums * outputs.sums).sum((-1, -2)) + (upstream.normalizer * outputs.normalizer).sum(-1)
    chunk, tokens = plan.chunk if inputs.local_key is not None else 1, inputs.key.shape[2]
    positions = torch.arange(tokens, device=gradient.device)
    if inputs.length is None:
        return gradient + leaving[..., None] * (positions < tokens - tokens % chunk)
    length = inputs.length.to(gradient.device)[:, None]
    return gradient + leaving[..., None] * (positions < length - length % chunk)[:, None]


def _operations(shapes: Inputs, plan: Plan) -> int:
    """Floating-point operations of the forward pass, multiply-adds counted as two; half of a causal chunk."""
    batch, heads, queries, features = shapes.query
    keys, width = shapes.key[2], shapes.value[3] + 1
    expanded = features * (features + 1) // 2 if plan.power == 2 else expanded_size(features, 1, plan.factors)
    sums = 2 * expanded * width * batch * (heads * queries + shapes.key[1] * keys)
    if not plan.causal:
        return sums
    inner = features if shapes.local_query is None else shapes.local_query[3]
    # Of a block longer than a chunk every token reads, and is folded, in both directions.
    sums *= 2 if plan.diagonal > plan.chunk else 1
    seen = 1 if plan.diagonal == Diagonal.CAUSAL else 2  # of a chunk, in halves
    return sums + seen * batch * heads * queries * min(plan.chunk, keys) * (inner + width)


@counts_operations_of(torch.ops.polysketch.linear_attention)
def _forward_operations(*shapes, **_) -> int:
    return _operations(*_unpacked(shapes)[:2])


@counts_operations_of(torch.ops.polysketch.linear_attention_backward)
def _backward_operations(gradients, outputs, *shapes, **_) -> int:
    return 2 * _operations(*_unpacked(shapes)[:2])
