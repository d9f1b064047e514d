"""The part of an exported program that is the same in every one: it runs one step on random inputs."""

from __future__ import annotations

VALUE = '''
class Value(NamedTuple):
    """An argument or result of `forward` or `backward`."""

    kind: str  # param, buffer, input, tangent, saved, rank, seed; output, mutation, gradient, saved
    path: str  # the parameter's, buffer's, input's or output's name in the model, or a mesh axis
    dtype: Any
    local_shape: Any  # of the first rank
    global_shape: Any
    cuts: dict  # mesh axis -> the dim that is cut along it
    sharding: str
'''

_STEP = '''
def local_shape(value, coordinate):
    """Shape of the part that the rank at `coordinate` holds; a dim that does not divide is cut as torch.chunk does."""
    if value.global_shape is None:
        return value.local_shape
    shape = list(value.global_shape)
    for axis, dim in value.cuts.items():
        chunk = -(-shape[dim] // MESH[axis])
        shape[dim] = max(0, min(chunk, shape[dim] - coordinate[axis] * chunk))
    return tuple(shape)


def example(value, coordinate, seed):
    """A value to run with: random floats from 0 to 1, zeros of other dtypes, a position, or a seed."""
    if value.kind == "rank":
        return coordinate[value.path]
    if value.kind == "seed":
        return 0
    shape = local_shape(value, coordinate)
    if not value.dtype.is_floating_point:
        return torch.zeros(shape, dtype=value.dtype, device=DEVICE)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, value.dtype)


def run_step(groups, coordinate):
    """Run `forward`, and `backward` if there is one, on examples; returns the results of each by its name."""
    arguments = [example(value, coordinate, i) for i, value in enumerate(INPUTS["forward"])]
    results = {"forward": forward(*arguments, groups=groups)}
{backward}    return results


def main():
    """Run one step on this rank and print what comes out of it on the first."""
    num_ranks, started = math.prod(MESH.values()), not dist.is_initialized()
    if started:
        num_started = int(os.environ.get("WORLD_SIZE", 1))
        if num_started != num_ranks:
            how = f"torchrun --nproc-per-node {num_ranks} {__file__}"
            raise SystemExit(f"needs {num_ranks} ranks and has {num_started}; start it with: {how}")
        if DEVICE == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", **alone)
    mesh = init_device_mesh(DEVICE, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    groups = {axis: mesh.get_group(axis).group_name for axis in MESH}
    results = run_step(groups, dict(zip(MESH, mesh.get_coordinate())))
    if dist.get_rank() == 0:
        for function, values in results.items():
            for spec, value in zip(OUTPUTS[function], values):
                if spec.kind != "saved":
                    what = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else value
                    print(f"{function}: {spec.kind} {spec.path}: {what}")
    if started:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

_STEP_BACKWARD = """\
    known = {(v.kind, v.path): argument for v, argument in zip(INPUTS["forward"], arguments)}
    known.update({(v.kind, v.path): result for v, result in zip(OUTPUTS["forward"], results["forward"])})
    arguments = []
    for value in INPUTS["backward"]:
        if value.kind == "tangent":  # each rank takes a mean over its own rows; their average is the whole mean
            divisor = math.prod(MESH.values()) if value.cuts else 1
            tangent = torch.ones(local_shape(value, coordinate), dtype=value.dtype, device=DEVICE)
            arguments.append(tangent / divisor)
        elif (value.kind, value.path) in known:
            arguments.append(known[value.kind, value.path])
        else:
            arguments.append(example(value, coordinate, 0))
    results["backward"] = backward(*arguments, groups=groups)
"""


def step_text(trains: bool) -> str:
    """The functions that run one step, with its backward half if the program trains."""
    return _STEP.replace("{backward}", _STEP_BACKWARD if trains else "")
