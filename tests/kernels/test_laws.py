"""The laws that every kernel keeps, whatever its formula, over tests/kernels/cases.py.

Value and gradient are compiled twice a case: for the small arrays on one device, and for larger,
padded arrays spread over eight. Every law is checked on those two.
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrl.kernels
from tests.kernels.cases import CASES, INDEX, LARGE, SMALL, UNIT, Case

LEADING = ("row", "rollout", "position")
PADDED = [axis for axis in SMALL if LARGE[axis] > SMALL[axis]]
RTOL, ATOL = 1e-5, 1e-6

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def kernels() -> set[str]:
    found = set()
    for module in pkgutil.iter_modules(jaxrl.kernels.__path__):
        members = vars(importlib.import_module(f"jaxrl.kernels.{module.name}"))
        found |= {
            f"{module.name}.{name}"
            for name, member in members.items()
            if (inspect.isfunction(member) or isinstance(member, jax.custom_vjp))
            and not name.startswith("_")
            and member.__module__ == f"jaxrl.kernels.{module.name}"
        }
    return found


def test_every_kernel_has_a_case():
    assert len(kernels()) > 20
    assert kernels() == {case.name for case in CASES}


def cotangents(case: Case) -> np.ndarray:
    """How much each entry of the output counts in the objective that is differentiated."""
    return np.random.default_rng(7).normal(size=[SMALL[axis] for axis in case.out])


@functools.cache
def compiled(name: str, devices: int):
    """(arrays, cotangent) -> (outputs, gradients by the float arguments); numpy in, numpy out."""
    case = next(case for case in CASES if case.name == name)
    call = case.call(SMALL if devices == 1 else LARGE)
    floats = [i for i, n in enumerate(case.arguments) if n in case.kind("value", "logp")]

    def objective(differentiated, arrays, cotangent):
        for i, x in zip(floats, differentiated, strict=True):
            arrays = [*arrays[:i], x, *arrays[i + 1 :]]
        outputs = jax.tree.leaves(call(*arrays))
        return sum((x * cotangent).sum() for x in outputs), outputs

    @jax.jit
    def both(arrays, cotangent):
        differentiated = [arrays[i] for i in floats]
        (_, outputs), grads = jax.value_and_grad(objective, has_aux=True)(
            differentiated, arrays, cotangent
        )
        return outputs, grads

    mesh = Mesh(np.array(jax.devices()[:devices]), ("all",))
    spread = NamedSharding(mesh, PartitionSpec("all"))

    def run(arrays: Mapping[str, np.ndarray], cotangent: np.ndarray):
        placed = [jax.device_put(jnp.asarray(x), spread) for x in arrays.values()]
        cotangent = jax.device_put(jnp.asarray(cotangent, jnp.float32), spread)
        outputs, grads = both(placed, cotangent)
        return (
            [np.asarray(x) for x in outputs],
            {n: np.asarray(g) for n, g in zip(case.kind("value", "logp"), grads, strict=True)},
        )

    return run


@functools.cache
def plain(name: str):
    case = next(case for case in CASES if case.name == name)
    return compiled(name, 1)(case.arrays(), cotangents(case))


def same(got, expected, what=""):
    np.testing.assert_allclose(got, expected, rtol=RTOL, atol=ATOL, err_msg=what)


def check(case: Case, got, expected=None):
    outputs, grads = plain(case.name) if expected is None else expected
    for i, (a, b) in enumerate(zip(got[0], outputs, strict=True)):
        same(a, b, f"output {i}")
    for name in grads:
        same(got[1][name], grads[name], f"gradient by {name}")


class Layout:
    """Where entries of the small arrays lie in the large ones; the rest is padding."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.place = {
            axis: np.sort(rng.permutation(LARGE[axis])[: SMALL[axis]])
            if axis == "token"
            else rng.permutation(LARGE[axis])[: SMALL[axis]]
            for axis in SMALL
        }
        self.place |= {axis: np.arange(SMALL[axis]) for axis in SMALL if axis not in PADDED}

    def where(self, axes, keep):
        return np.ix_(*(self.place[a][keep[a]] if a in LEADING else self.place[a] for a in axes))

    def pad(self, case: Case, arrays, keep):
        padded = {}
        for name, (axes, kind) in case.arguments.items():
            x = arrays[name]
            shape = [LARGE[axis] for axis in axes]
            if kind == "label":  # padding may carry any label, also one that is in use
                large = self.rng.choice(np.append(x, [99, -99]), shape).astype(x.dtype)
            elif kind in ("index", "taken"):
                large = self.rng.integers(0, LARGE["vocab"], shape).astype(x.dtype)
            elif name in case.guarded:
                large = self.rng.choice([np.nan, 1e9, -np.inf], shape).astype(x.dtype)
            else:
                large = np.zeros(shape, x.dtype)
            if kind == "index":
                x = self.place["rollout"][x]
            real = np.ix_(*(keep[a] if a in LEADING else np.arange(SMALL[a]) for a in axes))
            large[self.where(axes, keep)] = x[real]
            padded[name] = large
        return padded

    def run(self, case: Case, keep):
        """Outputs and gradients at the kept entries, scattered into arrays of the small sizes."""
        cotangent = np.zeros([LARGE[axis] for axis in case.out])
        real = np.ix_(*(keep[a] if a in LEADING else np.arange(SMALL[a]) for a in case.out))
        cotangent[self.where(case.out, keep)] = cotangents(case)[real]
        outputs, grads = compiled(case.name, 8)(self.pad(case, case.arrays(), keep), cotangent)

        def back(x, axes):
            small = np.zeros([SMALL[axis] for axis in axes], x.dtype)
            at = np.ix_(*(keep[a] if a in LEADING else np.arange(SMALL[a]) for a in axes))
            small[at] = x[self.where(axes, keep)]
            return small

        return (
            [back(x, case.out) for x in outputs],
            {n: back(g, case.arguments[n][0]) for n, g in grads.items()},
        )


EVERYTHING = {axis: np.arange(SMALL[axis]) for axis in LEADING}


@every_case
def test_jit_changes_nothing(case):
    outputs = jax.tree.leaves(case.call(SMALL)(*map(jnp.asarray, case.arrays().values())))
    for a, b in zip(outputs, plain(case.name)[0], strict=True):
        same(a, b)


@every_case
def test_shapes_are_as_stated(case):
    for x in plain(case.name)[0]:
        assert x.shape == tuple(SMALL[axis] for axis in case.out)


@every_case
def test_padding_and_eight_devices_change_nothing(case):
    check(case, Layout(1).run(case, EVERYTHING))


@pytest.mark.parametrize(
    "case", [case for case in CASES if set(case.out) & set(LEADING)], ids=lambda case: case.name
)
def test_a_cut_at_group_borders_changes_nothing(case):
    pieces = []
    for piece in (0, 1):
        keep = {axis: np.flatnonzero(UNIT // 2 == piece) for axis in LEADING}
        assert set(INDEX[keep["row"]]) <= set(keep["rollout"])
        pieces.append(Layout(2 + piece).run(case, keep))
    outputs = [a + b for a, b in zip(pieces[0][0], pieces[1][0], strict=True)]
    grads = {name: pieces[0][1][name] + pieces[1][1][name] for name in pieces[0][1]}
    check(case, (outputs, grads))


@every_case
def test_order_is_equivariant(case):
    rng = np.random.default_rng(4)
    order = {axis: np.arange(SMALL[axis]) for axis in SMALL}  # new place -> old place
    order |= {axis: rng.permutation(SMALL[axis]) for axis in (*LEADING, *PADDED) if axis != "token"}

    def move(x, axes):
        return x[order[axes[0]]]

    arrays = case.arrays()
    for name in case.kind("index"):
        arrays[name] = np.argsort(order["rollout"])[arrays[name]].astype(np.int32)
    moved = {name: move(arrays[name], axes) for name, (axes, _) in case.arguments.items()}
    outputs, grads = plain(case.name)
    expected = (
        [move(x, case.out) for x in outputs],
        {name: move(g, case.arguments[name][0]) for name, g in grads.items()},
    )
    got = compiled(case.name, 1)(moved, move(cotangents(case), case.out))
    check(case, got, expected)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.kind("label")], ids=lambda case: case.name
)
def test_relabelling_changes_nothing(case):
    arrays = case.arrays()
    for name in case.kind("label"):
        old = np.unique(arrays[name])
        new = np.random.default_rng(5).permutation([-(2**30), 2**31 - 1, 12, 0])[: old.size]
        arrays[name] = new[np.searchsorted(old, arrays[name])].astype(np.int32)
    check(case, compiled(case.name, 1)(arrays, cotangents(case)))


masked_cases = pytest.mark.parametrize(
    "case", [case for case in CASES if case.kind("mask")], ids=lambda case: case.name
)


@masked_cases
def test_garbage_behind_the_mask_does_not_leak(case):
    arrays = case.arrays()
    (mask,) = (arrays[name] for name in case.kind("mask"))
    assert (~mask).any()
    for garbage in (np.nan, 1e9, -np.inf):
        for name in case.guarded:
            arrays[name] = np.where(mask, case.arrays()[name], garbage).astype(np.float32)
        check(case, compiled(case.name, 1)(arrays, cotangents(case)))


@masked_cases
def test_case_10_everything_masked_is_finite_and_without_gradient(case):
    arrays = case.arrays()
    for name in case.kind("mask"):
        arrays[name] = np.zeros_like(arrays[name])
    outputs, grads = compiled(case.name, 1)(arrays, cotangents(case))
    assert all(np.isfinite(x).all() for x in outputs)
    for name, g in grads.items():
        np.testing.assert_array_equal(g, 0, err_msg=name)


@every_case
def test_gradients_are_finite_far_out(case):
    arrays = case.arrays()
    rng = np.random.default_rng(6)
    for name in case.kind("logp"):
        arrays[name] = rng.choice([-1e4, -100, 0], arrays[name].shape).astype(np.float32)
    for name in case.kind("value"):
        arrays[name] = rng.choice([-1e4, 0, 1e4], arrays[name].shape).astype(np.float32)
    outputs, grads = compiled(case.name, 1)(arrays, cotangents(case))
    assert all(np.isfinite(x).all() for x in [*outputs, *grads.values()])


def cast(case: Case, dtype) -> list[np.ndarray]:
    floats = case.kind("value", "logp")
    return [x.astype(dtype) if n in floats else x for n, x in case.arrays().items()]


floating_cases = pytest.mark.parametrize(
    "case", [case for case in CASES if case.kind("value", "logp")], ids=lambda case: case.name
)


@floating_cases
def test_bfloat16_in_float32_out(case):
    narrow = cast(case, jnp.bfloat16)
    outputs = jax.tree.leaves(case.call(SMALL)(*map(jnp.asarray, narrow)))
    widened = {
        name: x.astype(np.float32) if x.dtype == jnp.bfloat16 else x
        for name, x in zip(case.arguments, narrow, strict=True)
    }
    expected, _ = compiled(case.name, 1)(widened, cotangents(case))
    for a, b in zip(outputs, expected, strict=True):
        assert a.dtype == (jnp.float32 if jnp.issubdtype(a.dtype, jnp.floating) else jnp.int32)
        same(a, b)


@floating_cases
def test_float64_stays_float64(case):
    with jax.enable_x64(True):
        shapes = jax.eval_shape(case.call(SMALL), *map(jnp.asarray, cast(case, np.float64)))
    floats = {x.dtype for x in jax.tree.leaves(shapes) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert floats == {np.dtype(np.float64)}
