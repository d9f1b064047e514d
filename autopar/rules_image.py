"""Rules of convolutions, pooling, resampling and group norm: batch and channels may be cut, positions stay whole."""

from __future__ import annotations

import torch

from autopar.rules import Call, Dims, OpRule, build, derives
from autopar.rules_view import names

aten = torch.ops.aten


def _positions(letter: str, count: int) -> Dims:
    return tuple((f"{letter}{i}",) for i in range(count))


def _convolution_terms(call: Call) -> tuple[Dims, Dims, Dims, list[str]]:
    """Dims of input, weight and output, and the factors that stay whole.

    With several groups a group's channels are a factor inside the channel dim, and only the groups are cut: the rewrite
    sets the argument that counts them.
    """
    num = len(call["stride"])
    here, taps, there = _positions("x", num), _positions("k", num), _positions("y", num)
    whole = [name for dims in (here, taps, there) for (name,) in dims]
    group: tuple[str, ...] = () if call["groups"] == 1 else ("g",)
    rows, columns = (("c",), ("o",)) if call["transposed"] else (("o",), ("c",))
    weight: Dims = ((*group, *rows), columns, *taps)
    source: Dims = (("n",), (*group, "c"), *here)
    return source, weight, (("n",), (*group, "o"), *there), [*whole, "c", "o"] if group else whole


@derives(aten.convolution)
def convolution(call: Call) -> OpRule:
    """Input channels are contracted; with a bias they stay whole, since every rank would add it."""
    source, weight, result, whole = _convolution_terms(call)
    biased = call.args.get("bias") is not None
    inputs: dict[str, Dims | list[Dims]] = {"input": source, "weight": weight}
    if biased:
        inputs["bias"] = (result[1],)
    return build(
        call,
        inputs,
        [result],
        whole=[*whole, "c"] if biased else whole,
        linear=[] if biased else [["input"], ["weight"]],
    )


@derives(aten.convolution_backward)
def convolution_backward(call: Call) -> OpRule:
    """Gradients of input, weight and bias.  The bias's does not see the input's channels, so that a cut of those would
    be taken for a sum: where it is wanted they stay whole."""
    source, weight, result, whole = _convolution_terms(call)
    inputs: dict[str, Dims | list[Dims]] = {"grad_output": result, "input": source, "weight": weight}
    wanted = call["output_mask"]
    outs = [dims if asked else () for dims, asked in zip((source, weight, (result[1],)), wanted, strict=True)]
    return build(call, inputs, outs, whole=[*whole, "c"] if wanted[2] else whole, linear=[["grad_output"]])


# ------------------------------------------------------------------------------------------------ pooling, resampling


def _by_channel(call: Call, source: str, num: int) -> tuple[Dims, Dims, list[str]]:
    """Dims of an op that treats each channel of each image by itself: of the input and of the output."""
    lead = tuple((f,) for f in names(len(call.shape(source)) - num))
    here, there = _positions("x", num), _positions("y", num)
    return (*lead, *here), (*lead, *there), [name for dims in (here, there) for (name,) in dims]


def _num_positions(call: Call) -> int:
    """How many dims an image op's name says that its images have."""
    return int(next(letter for letter in str(call.op._schema.name) if letter.isdigit()))


@derives(
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.avg_pool1d.default,
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
    aten.upsample_linear1d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bicubic2d.default,
    aten.upsample_trilinear3d.default,
)
def by_channel(call: Call) -> OpRule:
    """Pooling, padding and resampling of each channel; indices count positions within a channel."""
    source, result, whole = _by_channel(call, "self", _num_positions(call))
    return build(call, {"self": source}, [result] * len(call.outputs), whole=whole)


@derives(
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def by_channel_backward(call: Call) -> OpRule:
    """The gradient of the input of such an op."""
    source, result, whole = _by_channel(call, "self", _num_positions(call))
    inputs: dict[str, Dims | list[Dims]] = {"grad_output": result, "self": source}
    if "indices" in call.args:
        inputs["indices"] = result
    return build(call, inputs, [source], whole=whole, linear=[["grad_output"]])


@derives(
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default,
    aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
)
def resample_backward(call: Call) -> OpRule:
    """The gradient of a resampled image, whose size is an argument."""
    result, source, whole = _by_channel(call, "grad_output", _num_positions(call))
    return build(call, {"grad_output": result}, [source], whole=whole, linear=[["grad_output"]])


def _sampled(call: Call) -> tuple[Dims, Dims, Dims]:
    """Dims of an image, of the grid of places at which it is sampled, and of the samples."""
    num = len(call.shape("input")) - 2
    there = _positions("y", num)
    return (("n",), ("c",), *_positions("x", num)), (("n",), *there, ("place",)), (("n",), ("c",), *there)


@derives(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sample(call: Call) -> OpRule:
    """Each place of the grid is looked at in all channels of the whole image."""
    image, grid, samples = _sampled(call)
    whole = ["place", *(name for (name,) in image[2:])]
    return build(call, {"input": image, "grid": grid}, [samples], whole=whole, linear=[["input"]])


@derives(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sample_backward(call: Call) -> OpRule:
    """Gradients of the image, summed over the places, and of the grid, summed over the channels."""
    image, grid, samples = _sampled(call)
    inputs: dict[str, Dims | list[Dims]] = {"grad_output": samples, "input": image, "grid": grid}
    outs = [dims if asked else () for dims, asked in zip((image, grid), call["output_mask"], strict=True)]
    return build(call, inputs, outs, whole=["place", *(name for (name,) in image[2:])], linear=[["grad_output"]])


@derives(aten.im2col.default, aten.col2im.default)
def windows(call: Call) -> OpRule:
    """Windows of an image, one below another in the channel dim, and back."""
    unfolds = "im2col" in str(call.op._schema.name)
    lead = tuple((f,) for f in names(len(call.shape("self")) - (3 if unfolds else 2)))
    image: Dims = (*lead, ("c",), ("x0",), ("x1",))
    columns: Dims = (*lead, ("c", "k"), ("l",))
    taps = {"k": int(call["kernel_size"][0]) * int(call["kernel_size"][1])}
    source, result = (image, columns) if unfolds else (columns, image)
    return build(call, {"self": source}, [result], known=taps, whole=["k", "l", "x0", "x1"], linear=[["self"]])


@derives(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def pixel_shuffle(call: Call) -> OpRule:
    """Channels are (c, a, b), positions (h, a) and (w, b): only the innermost factors move."""
    lead = tuple((f,) for f in names(len(call.shape("self")) - 3))
    packed: Dims = (*lead, ("c", "a", "b"), ("h",), ("w",))
    spread: Dims = (*lead, ("c",), ("h", "a"), ("w", "b"))
    shuffles = "pixel_shuffle" in str(call.op._schema.name)
    scale = int(call["upscale_factor"] if shuffles else call["downscale_factor"])
    source, result = (packed, spread) if shuffles else (spread, packed)
    return build(call, {"self": source}, [result], known={"a": scale, "b": scale}, whole=["a", "b"], linear=[["self"]])


# --------------------------------------------------------------------------------------------------------- group norm


@derives(aten.native_group_norm.default)
def group_norm(call: Call) -> OpRule:
    """Images and groups may be cut; a group's channels and positions are normalised together."""
    rank = len(call.shape("input"))
    rest = _positions("x", rank - 2)
    channels: tuple[str, ...] = ("g", "c")
    image: Dims = (("n",), channels, *rest)
    inputs: dict[str, Dims | list[Dims]] = {"input": image, "weight": (channels,), "bias": (channels,)}
    whole = ["c", *(name for (name,) in rest)]
    return build(call, inputs, [image, (("n",), ("g",)), (("n",), ("g",))], whole=whole)


@derives(aten.native_group_norm_backward.default)
def group_norm_backward(call: Call) -> OpRule:
    """The gradients of weight and bias sum over images."""
    rank = len(call.shape("input"))
    rest = _positions("x", rank - 2)
    channels: tuple[str, ...] = ("g", "c")
    image: Dims = (("n",), channels, *rest)
    statistics: Dims = (("n",), ("g",))
    inputs: dict[str, Dims | list[Dims]] = {
        "grad_out": image,
        "input": image,
        "mean": statistics,
        "rstd": statistics,
        "weight": (channels,),
    }
    dims: tuple[Dims, ...] = (image, (channels,), (channels,))
    outs = [d if isinstance(v, torch.Tensor) else () for d, v in zip(dims, call.outputs, strict=True)]
    return build(call, inputs, outs, whole=["c", *(name for (name,) in rest)])
