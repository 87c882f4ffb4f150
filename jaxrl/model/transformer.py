"""A decoder by config: pre-norm blocks of grouped-query attention and a gated inner block, in Flax
NNX.

    x = E[token];  in each block: x += attention(norm(x)), x += mlp(norm(x))
    logits = norm(x) @ E^T (tied head) or norm(x) @ W

What differs between Qwen3, Llama 3, Qwen3-MoE, Gemma 3 and MiMo-V2 (local layers, sinks, experts,
norms, scales) is said by ``ModelConfig``. NNX only declares parameters here: everything is called
as a pure function after ``split`` and ``merge``. Layers whose parameters look alike are one Block
whose parameters have a leading layer axis, scanned.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxrl.model import novelty
from jaxrl.model.attention import Fused
from jaxrl.model.experts import Visiting
from jaxrl.model.form import DTYPES, REMAT, ModelConfig, stacks
from jaxrl.model.layers import (
    EXPERTS,
    Block,
    Guide,
    Linear,
    Mixture,
    Remember,
    RMSNorm,
    Routing,
    Sight,
    keep,
    sight,
)
from jaxrl.model.sharing import Bins, SharedMask, shared_masks, visible

# Stacks up to this depth are unrolled inside the scan: its copies of what the backward pass needs
# cost a fifth of the step on XLA:CPU, while unrolling a deep stack costs minutes of compilation.
UNROLLED_LAYERS = 8

Params = Mapping[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guidance:
    """What the sparse layers are told, for all of them: recorded routes to follow (-1: none), and
    the experts' shares for the balance term; None: the routers choose, the term is not asked for.
    """

    recorded: Int[Array, "row token layer k"] | None
    share: Float[Array, "layer expert"] | None


UNGUIDED = Guidance(None, None)


@dataclasses.dataclass(frozen=True)
class Run:
    """Layers that follow one another and lie side by side in a stack."""

    stack: str
    first: int  # place in the stack
    layers: tuple[int, ...]
    sparse: int | None  # place of the first among the sparse layers; None: they are dense


def runs(config: ModelConfig) -> list[Run]:
    """The layers in order, as pieces of stacks."""
    named = stacks(config)
    owner = {layer: stack for stack, layers in named.items() for layer in layers}
    found = []
    for stack, group in groupby(range(config.layers), lambda layer: owner[layer]):
        layers = tuple(group)
        sparse = config.sparse_layers
        place = sparse.index(layers[0]) if layers[0] in sparse else None
        found.append(Run(stack, named[stack].index(layers[0]), layers, place))
    return found


class Decoder(nnx.Module):
    """Embedding, stacked blocks, last norm, head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        table = jax.random.normal(rngs.params(), (config.vocab_size, config.width))
        table = table / np.sqrt(config.width) / config.embed_scale
        self.embedding = nnx.Param(
            table.astype(DTYPES[config.param_dtype]), axes=("vocab", "embed")
        )
        for stack, layers in stacks(config).items():
            setattr(self, stack, self._stack(config, layers, rngs))
        self.norm = RMSNorm(config.width, config)
        self.head = (
            None
            if config.tied_head or config.outputs
            else Linear("head", (config.width, config.vocab_size), ("embed", "vocab"), config, rngs)
        )
        # Its columns are too few to be split, hence another name and other axes than the head's.
        self.output = (
            Linear("output", (config.width, config.outputs), ("embed", None), config, rngs)
            if config.outputs
            else None
        )
        self.config = config

    @staticmethod
    def _stack(config: ModelConfig, layers: tuple[int, ...], rngs: nnx.Rngs) -> Block:
        """One block for all of these layers, its parameters stacked."""
        kind = config.kind(layers[0])

        def block(key: Any) -> Block:
            return Block(config, kind, nnx.Rngs(params=key))

        definition, _ = nnx.split(nnx.eval_shape(lambda: block(0)))
        keys = jax.random.split(rngs.params(), len(layers))
        return nnx.merge(definition, jax.vmap(lambda key: nnx.state(block(key)))(keys))

    def embed(self, tokens: Int[Array, "row token"]) -> Array:
        """Token ids -> x, in the compute dtype."""
        x = jnp.take(self.embedding[...], tokens, axis=0).astype(DTYPES[self.config.dtype])
        return x if self.config.embed_scale == 1 else x * self.config.embed_scale

    def hidden(
        self,
        tokens: Int[Array, "row token"],
        position: Int[Array, "row token"],
        segment: Int[Array, "row token"],
        constrain: Callable[[Array], Array],
        mix: Mixture,
        guidance: Guidance = UNGUIDED,
        bins: Bins | None = None,
        fused: Fused | None = None,
        remember: Remember = keep,
    ) -> tuple[Float[Array, "row token embed"], Routing | None]:
        """Last hidden states; a token sees the earlier tokens of its own segment and itself, and in
        rows of ``bins`` the prefix. Beside them what the sparse layers did: ``chosen[row token
        layer k]``, ``balance`` their mean."""
        far, close = self.sights(*self._masks(position, segment, bins), position)
        sights = far.by(fused, segment), close.by(fused, segment)
        x, _, routing = self._through(
            tokens, segment, sights, constrain, mix, guidance, lambda x: None, remember
        )
        return self.norm(x), routing

    def features(
        self,
        tokens: Int[Array, "row token"],
        position: Int[Array, "row token"],
        segment: Int[Array, "row token"],
        constrain: Callable[[Array], Array],
        mix: Mixture,
        mask: Bool[Array, "row token"],
        remember: Remember = keep,
    ) -> Float[Array, "row layer embed"]:
        """Mean over a row's counted tokens of the states at ``novelty.depths``, in float32; 0 where
        none counts.
        """

        def pool(x: Array) -> Array:
            return novelty.pooled(x, mask)

        sights = self.sights(*self._masks(position, segment, None), position)
        _, after, _ = self._through(
            tokens, segment, sights, constrain, mix, UNGUIDED, pool, remember
        )
        each = jnp.concatenate([pool(self.embed(tokens))[None], after])
        return jnp.moveaxis(each[jnp.array(novelty.depths(after.shape[0]))], 0, 1)

    def _masks(
        self, position: Array, segment: Array, bins: Bins | None
    ) -> tuple[Array | SharedMask, Array | SharedMask]:
        """What the tokens of global and of local layers see."""
        if bins is not None:
            return shared_masks(position, segment, bins, window=self.config.window)
        seen = visible(segment)
        near = jnp.arange(segment.shape[1])
        return seen, seen & (near[:, None] - near[None, :] < self.config.window)

    def _through(
        self,
        tokens: Array,
        segment: Array,
        sights: tuple[Sight, Sight],
        constrain: Callable[[Array], Array],
        mix: Mixture,
        guidance: Guidance,
        note: Callable[[Array], Any],
        remember: Remember,
    ) -> tuple[Array, Any, Routing | None]:
        """The states after the last block, what ``note`` says of those after each, the routing."""
        counted = segment > 0
        x, noted, routings = constrain(self.embed(tokens)), [], []
        for run in runs(self.config):
            body, xs = self._body(run, sights, counted, guidance, remember)

            def step(x: Array, layer: Any, mix: Any = mix, body: Any = body) -> tuple[Array, Any]:
                x, routing = body(x, layer, mix)
                x = constrain(x)
                return x, (note(x), routing)

            few = self.config.layers <= UNROLLED_LAYERS
            if few and run.sparse is not None and isinstance(mix, Visiting):
                x, (told, routing) = self._visit(step, mix, x, xs)
            else:
                unroll = len(run.layers) if few else 1
                x, (told, routing) = jax.lax.scan(self._kept(step), x, xs, unroll=unroll)
            noted.append(told)
            routings += [] if routing is None else [routing]
        together = jax.tree.map(lambda *parts: jnp.concatenate(parts), *noted)
        if not routings:
            return x, together, None
        chosen = jnp.concatenate([routing.chosen for routing in routings])
        balance = jnp.concatenate([routing.balance for routing in routings]).mean(0)
        return x, together, Routing(jnp.moveaxis(chosen, 0, 2), balance)

    def _visit(self, step: Any, mix: Visiting, x: Array, xs: Any) -> tuple[Array, Any]:
        """``jax.lax.scan`` over layers with experts, whose weights stay in their stacks: these are
        handed from layer to layer (``Visiting.within``), in place of a layer's own part."""
        params, *others = xs
        stacks = tuple(params["mlp"][name][...].astype(x.dtype) for name in EXPERTS)
        key = jax.tree_util.DictKey
        handed = {(key("mlp"), key(name)) for name in EXPERTS}

        def constant(path: Any, leaf: Array) -> Array:
            return jax.lax.stop_gradient(leaf) if path[:2] in handed else leaf

        xs = (jax.tree_util.tree_map_with_path(constant, params), *others)
        told = []
        for i in range(stacks[0].shape[0]):

            def one(x: Array, stacks: Any, layer: Any, i: int = i) -> tuple[Array, Any, Any]:
                def within(x: Array, routes: Array, gates: Array, *_: Array, **how: Any) -> Array:
                    nonlocal stacks
                    made, stacks = mix.within(x, routes, gates, stacks, i, **how)
                    return made

                x, noted = step(x, layer, within)
                return x, stacks, noted

            layer = jax.tree.map(lambda leaf, i=i: leaf[i], xs)
            x, stacks, noted = self._kept(one)(x, stacks, layer)
            told.append(noted)
        return x, jax.tree.map(lambda *each: jnp.stack(each), *told)

    def _kept(self, step: Any) -> Any:
        """The step of the scan, with what the backward pass computes again."""
        if self.config.remat == "none":
            return step
        policies = jax.checkpoint_policies
        if self.config.remat == "dots":
            return jax.checkpoint(step, policy=policies.dots_with_no_batch_dims_saveable)
        names = REMAT[self.config.remat]
        policy = policies.save_only_these_names(*names) if names else None
        return jax.checkpoint(step, policy=policy)

    def _body(
        self,
        run: Run,
        sights: tuple[Sight, Sight],
        counted: Array,
        guidance: Guidance,
        remember: Remember,
    ) -> tuple[Any, Any]:
        """What one layer of a run does, and what each of them is given."""
        definition, stacked = nnx.split(vars(self)[run.stack])
        whole = jax.tree.leaves(stacked)[0].shape[0] == len(run.layers)
        part = slice(run.first, run.first + len(run.layers))
        params = stacked if whole else jax.tree.map(lambda leaf: leaf[part], stacked)
        flags = [self.config.is_local(layer) for layer in run.layers]
        mixed = len(set(flags)) > 1
        recorded, share = None, None
        if run.sparse is not None:
            told = slice(run.sparse, run.sparse + len(run.layers))
            if guidance.recorded is not None:
                recorded = jnp.moveaxis(guidance.recorded, 2, 0)[told]
            share = None if guidance.share is None else guidance.share[told]

        def body(x: Array, layer: Any, mix: Any) -> tuple[Array, Routing | None]:
            params, local, recorded, share = layer
            everywhere, near = sights
            here = everywhere.or_local(near, local) if mixed else sights[flags[0]]
            guide = Guide(counted, recorded, share)
            x, _, _, routing = nnx.merge(definition, params)(x, here, remember, guide, mix)
            return x, routing

        return body, (params, jnp.array(flags) if mixed else None, recorded, share)

    def sights(self, seen: Any, near: Any, position: Array) -> tuple[Sight, Sight]:
        """What the queries of global and of local layers see, by their masks."""
        config = self.config
        everywhere = sight(config, seen, position, local=False)
        if not any(config.local_layers):
            return everywhere, everywhere
        return everywhere, sight(config, near, position, local=True)

    def layers(self) -> list[Block]:
        """The blocks one by one, for decoding: a scan would copy the cache at every step."""
        blocks = []
        for run in runs(self.config):
            definition, stacked = nnx.split(vars(self)[run.stack])
            for i in range(run.first, run.first + len(run.layers)):
                blocks.append(
                    nnx.merge(definition, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
                )
        return blocks

    def logits(self, hidden: Float[Array, "position embed"]) -> Float[Array, "position vocab"]:
        """Float32, accumulated in float32 whatever the compute dtype."""
        head = self.output or self.head
        kernel, axis = (self.embedding, 1) if head is None else (head.kernel, 0)
        dimensions = (((hidden.ndim - 1,), (axis,)), ((), ()))
        logits = jax.lax.dot_general(
            hidden, kernel[...].astype(hidden.dtype), dimensions, preferred_element_type=jnp.float32
        )
        return logits + head.added(hidden) if head is not None and head.adapted else logits


def name_of(path: tuple[Any, ...]) -> str:
    """A parameter's name: its path in the module joined with ``/``."""
    return "/".join(str(part) for part in path)


@lru_cache(maxsize=32)
def blueprint(config: ModelConfig) -> tuple[Any, Any]:
    """The module without arrays: (graph definition, state of shapes)."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=0))))


def initialise(config: ModelConfig, key: Array) -> dict[str, Array]:
    """Flat parameters by name; jit this with output shardings to have them born in place."""
    state = nnx.state(Decoder(config, nnx.Rngs(params=key)))
    return {name_of(path): leaf[...] for path, leaf in nnx.to_flat_state(state)}


def shapes(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each parameter, by name."""
    return {
        name_of(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in nnx.to_flat_state(blueprint(config)[1])
    }


def read_in(config: ModelConfig) -> dict[str, Any]:
    """The dtype that parameters are cast to wherever they are read, by name: what nobody trains
    may be held in it, and gives the same bits. Norms, biases and routers are read in float32."""
    cast = {"embedding", "kernel", "gate", "up", "down", "adapter_in", "adapter_out"}
    return {
        name: DTYPES[config.dtype]
        for name in shapes(config)
        if name.split("/")[-1] in cast and not name.endswith("router/kernel")
    }


def logical_axes(config: ModelConfig) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of each parameter, by name; those of blocks have ``layers`` in front."""
    named = {}
    for path, leaf in nnx.to_flat_state(blueprint(config)[1]):
        axes = leaf.get_metadata()["axes"]
        named[name_of(path)] = ("layers", *axes) if path[0] in stacks(config) else axes
    return named


def head_names(config: ModelConfig) -> list[str]:
    """The parameters that ``Decoder.logits`` reads."""
    own = [name for name in shapes(config) if name.split("/")[0] in ("head", "output")]
    return own or ["embedding"]


def untied(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same model with a head of its own: the embedding's numbers, if they were tied."""
    if not config.tied_head:
        return config, params
    head = jnp.swapaxes(params["embedding"], 0, 1)
    return dataclasses.replace(config, tied_head=False), {**params, "head/kernel": head}


def bind(config: ModelConfig, params: Params) -> Decoder:
    """Module from flat parameters.

    Raises ValueError naming all missing, surplus and mis-shaped ones at once.
    """
    definition, state = blueprint(config)
    expected = shapes(config)
    faults = [f"missing {name}" for name in sorted(set(expected) - set(params))]
    faults += [f"surplus {name}" for name in sorted(set(params) - set(expected))]
    faults += [
        f"{name} has shape {params[name].shape}, expected {expected[name].shape}"
        for name in sorted(set(params) & set(expected))
        if params[name].shape != expected[name].shape
    ]
    if faults:
        raise ValueError("parameters do not fit the model: " + "; ".join(faults))
    return nnx.merge(
        definition, nnx.map_state(lambda path, leaf: leaf.replace(params[name_of(path)]), state)
    )
