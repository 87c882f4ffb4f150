"""The model as pure functions of flat parameters: init and score. Logits of training live here
only.

``score`` runs each scorer's trunk once, then walks over chunks of positions: only a chunk's logits
exist at any time, in the forward pass and in the backward pass, so no ``[rollout token vocab]``
array is ever formed. Where memory is not what is short, ``score_remat`` off keeps the logits of a
micro-batch for its backward pass, which saves the head one product in four.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxrl.batch import Batch
from jaxrl.mesh import Rules, over_rows, require_divisible, spec, ways
from jaxrl.model import adapters, attention, chunks, novelty, tokamax_kernels, transformer
from jaxrl.model.chunks import Piece, Read
from jaxrl.model.experts import Visiting, matmul_for, mixture, sharded_mixture
from jaxrl.model.form import DTYPES, ModelConfig
from jaxrl.model.layers import Mixture, Routing
from jaxrl.model.sharing import Bins, PackedRows, PlainRows, rows_of
from jaxrl.model.transformer import UNGUIDED, Guidance, Params

STUDENT = "student"
VALUE = "value"
NOVELTY = "novelty"

# What ``score`` tells of the student's routers beside what was read; no algorithm's name has a
# slash.
CHOSEN = "router/chosen"
BALANCE = "router/balance"

Head = Callable[[Array, Array, Params], Array]  # (known, temperature, whole) -> logits


@jax.custom_vjp
def settled(tree: Any) -> Any:
    """The same; going back, no gradient is used before all that are asked for are there. A head's
    is then summed and split before the trunk's are begun, and not held whole, in float32, until
    their end."""
    return tree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Asked:
    """Of which leaves gradients are asked for: those of others would be made, to be settled too."""

    leaves: tuple[bool, ...]


def _remember(tree: Any) -> tuple[Any, _Asked]:
    leaves, form = jax.tree.flatten(tree)
    asked = _Asked(tuple(bool(leaf.perturbed) for leaf in leaves))
    return jax.tree.unflatten(form, [leaf.value for leaf in leaves]), asked


def _settle(asked: _Asked, given: Any) -> tuple[Any]:
    leaves, form = jax.tree.flatten(given)
    # What was read as a constant alone, as a teacher's view of the student is, has nothing given.
    there = [
        of and not isinstance(x, SymbolicZero) for x, of in zip(leaves, asked.leaves, strict=True)
    ]
    waiting = [x for x, is_there in zip(leaves, there, strict=True) if is_there]
    found = iter(jax.lax.optimization_barrier(waiting))
    return (jax.tree.unflatten(form, [next(found) if is_there else None for is_there in there]),)


settled.defvjp(_remember, _settle, symbolic_zeros=True)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A model form on a mesh, without arrays; hashable, hence a static argument of jitted
    functions.
    """

    config: ModelConfig
    mesh: Mesh | None
    rules: Rules
    others: tuple[tuple[str, ModelConfig], ...] = ()  # models that are not of the student's form
    # Nothing is read of a row before its first action, nor where none is: no head sees that.
    answers_only: bool = False

    def config_of(self, who: str) -> ModelConfig:
        """The form of the model that scores under this name."""
        return dict(self.others).get(who, self.config)

    def form_of(self, who: str) -> "Policy":
        """The policy of another model on the same mesh."""
        return Policy(self.config_of(who), self.mesh, self.rules)

    @property
    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axes of each parameter of the student and of the others: a name means the same
        in all of them, whatever its size."""
        return {
            name: axes
            for config in (*(config for _, config in self.others), self.config)
            for name, axes in transformer.logical_axes(config).items()
        }

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each parameter."""
        return transformer.shapes(self.config)

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """Partition of each parameter."""
        own = transformer.logical_axes(self.config)
        return {name: spec(axes, self.rules) for name, axes in own.items()}

    @property
    def shardings(self) -> dict[str, NamedSharding] | None:
        """Sharding of each parameter; None without a mesh."""
        if self.mesh is None:
            return None
        return {name: NamedSharding(self.mesh, entry) for name, entry in self.specs.items()}

    @property
    def mix(self) -> Mixture:
        """How tokens go through experts, on this mesh."""
        devices = jax.devices() if self.mesh is None else self.mesh.devices.flat
        matmul = matmul_for(self.config.kernels, devices[0].platform)
        if self.mesh is None or self.mesh.size == 1:
            padded = matmul == "padded"
            return Visiting() if padded else functools.partial(mixture, matmul=matmul)
        return sharded_mixture(self.mesh, self.rules, matmul=matmul)

    def init(self, key: Array) -> dict[str, Array]:
        """Parameters from a typed key, born in their shardings; the same bits on any mesh."""
        return jax.jit(transformer.initialise, static_argnums=0, out_shardings=self.shardings)(
            self.config, key
        )

    def constrain(self, x: Array, logical: tuple[str | None, ...]) -> Array:
        """State where an array lives; the same array without a mesh."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh, spec(logical, self.rules))
        )

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "row token"],
        position: Int[Array, "row token"],
        segment: Int[Array, "row token"],
    ) -> Float[Array, "row token embed"]:
        """Last hidden states. Raises ValueError if the rows do not divide over the mesh."""
        return self.routed(params, tokens, position, segment, UNGUIDED)[0]

    def routed(
        self,
        params: Params,
        tokens: Int[Array, "row token"],
        position: Int[Array, "row token"],
        segment: Int[Array, "row token"],
        guidance: Guidance,
        bins: Bins | None = None,
    ) -> tuple[Float[Array, "row token embed"], Routing | None]:
        """Last hidden states, and what the routers did; None of a dense model. With ``bins`` the
        rows are packed ones."""
        model, where = transformer.bind(self.config, params), self._by_rows(tokens)
        fused = None
        if bins is None:
            fused = attention.chosen(self.config, tokens.shape[1], self.mesh, self.rules)
        return model.hidden(
            tokens, position, segment, where, self.mix, guidance, bins, fused, self._gathered
        )

    def _by_rows(self, tokens: Array) -> Callable[[Array], Array]:
        require_divisible("rows of a micro-batch", tokens.shape[0], self.mesh, self.rules.rows)
        require_divisible("tokens of a row", tokens.shape[1], self.mesh, self.rules.tokens)
        return lambda x: self.constrain(x, ("rows", "tokens", None))

    def _gathered(self, key: Array, value: Array) -> tuple[Array, Array]:
        """Keys and values of all tokens of the row, wherever they were made."""
        if ways(self.mesh, self.rules.tokens) == 1:
            return key, value
        lying = ("rows", "kv_heads", None, "head")
        return self.constrain(key, lying), self.constrain(value, lying)

    def logits(
        self, params: Params, hidden: Float[Array, "position embed"]
    ) -> Float[Array, "position vocab"]:
        """Float32 logits of a few positions."""
        return transformer.bind(self.config, params).logits(hidden)

    def score(
        self,
        params: Mapping[str, Params],
        batch: Batch,
        read: Read,
        scorers: Sequence[tuple[str, str]],
        guidance: Guidance = UNGUIDED,
    ) -> dict[str, Array]:
        """What ``read`` says of each token, ``x[j]`` belonging to token j.

        ``params`` maps who scores to flat parameters. ``read(logits, taken)`` sees a chunk:
        ``logits[name][position vocab]`` in float32, divided by the temperature of the token they
        predict, and the ids taken there; it returns arrays whose first axis is position. A scorer's
        name is "student" for ("student", "plain"), else "who/view".

        x is 0 where there is nothing to score: padding, and the first token of a segment (nothing
        of its segment comes before). Where a view does not hold a token (``batch.held``) its logits
        are finite and mean nothing.

        ``value`` gives [position output], not divided by the temperature, and ``novelty``
        [position layer]: the error of each of its networks on the rollout's view, at every token.

        Of a student with experts, scored on the plain rows under ``guidance``, two more are told:
        ``router/chosen`` [row token layer k], the experts that the routers would choose for each
        token as an input (-1 on padding), and ``router/balance`` [row token].

        Of a packed batch x is 0 in prefixes too, which nobody trains on and no head sees, and where
        a rollout is not valid; else it is what it would be without ``batch.packed``. With
        ``answers_only`` x is 0 before a row's first action too, and in rows without one.
        """
        rows = rows_of(batch)
        states: dict[str, Array] = {}
        heads: dict[str, Head] = {}
        whole: dict[str, Params] = {}
        told: dict[str, Array] = {}
        for who, view in scorers:
            name = scorer_name(who, view)
            how = guidance if name == STUDENT else UNGUIDED
            states[name], heads[name], routing = self._scorer(params, rows, who, view, how)
            if who != NOVELTY:
                whole[name] = self.form_of(who)._head(params[who])
            if name == STUDENT and routing is not None:
                told = {CHOSEN: routing.chosen, BALANCE: routing.balance}
        scored = rows.scored
        if self.answers_only:
            scored &= rows.targets(jnp.cumsum(batch.acted, axis=1) > 0)
        temperature = jnp.where(scored, rows.targets(batch.temperature), 1.0)
        found = self.walk(
            states, whole, heads, rows.targets(batch.tokens), temperature, scored, read
        )

        def finish(x: Array) -> Array:
            mask = scored.reshape(scored.shape + (1,) * (x.ndim - 2))
            return rows.back(jnp.where(mask, x, jnp.zeros((), x.dtype)))

        return {name: finish(x) for name, x in found.items()} | told

    def walk(
        self,
        states: Mapping[str, Float[Array, "row token embed"]],
        whole: Mapping[str, Params],
        heads: Mapping[str, Head],
        taken: Int[Array, "row token"],
        temperature: Float[Array, "row token"],
        scored: Bool[Array, "row token"],
        read: Read,
    ) -> dict[str, Array]:
        """What ``read`` says of the logits that ``heads`` make of states, chunk after chunk, each
        of them made again in the backward pass if the form says so. Where nothing is ``scored`` it
        means nothing."""

        def head(piece: Piece, wide: Mapping[str, Params]) -> dict[str, Array]:
            hidden, _, temperature = piece
            return {
                name: heads[name](x, temperature, wide.get(name, {})) for name, x in hidden.items()
            }

        def devices_own(by_rows: Any, whole: Mapping[str, Params]) -> dict[str, Array]:
            *pieces, scored = by_rows
            # Gradients of chunks are added in float32, whatever the heads were gathered in.
            wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), whole)
            split = self.mesh is not None and self.mesh.size > ways(self.mesh, self.rules.rows)
            if self.answers_only and not split:
                every = head, read, tuple(pieces), wide, scored, self._limit
                return chunks.over_some(*every, keep=not self.config.score_remat)
            cut, join = self._chunks(*scored.shape)
            each = lambda piece: read(head(piece, wide), piece[1])  # noqa: E731
            if self.config.score_remat:
                each = jax.checkpoint(each)
            found = jax.lax.map(each, jax.tree.map(cut, tuple(pieces)))
            return {name: join(x) for name, x in found.items()}

        states, whole = settled((dict(states), whole))
        by_rows = (states, taken, temperature, scored)
        return over_rows(devices_own, self.mesh, self.rules)(by_rows, whole)

    @property
    def _limit(self) -> int:
        return self.config.score_chunk_positions

    def _head(self, params: Params) -> dict[str, Array]:
        """What logits are made of beside the states, in the compute dtype; whole along the axes
        that split rows."""
        axes = transformer.logical_axes(self.config)
        by_rows = {*self.rules.rows, *self.rules.tokens}

        def kept(logical: str | None) -> str | None:
            return logical if logical and not by_rows & set(self.rules[logical]) else None

        return {
            name: self.constrain(
                params[name].astype(DTYPES[self.config.dtype]), tuple(map(kept, axes[name]))
            )
            for name in transformer.head_names(self.config)
        }

    def _scorer(
        self,
        params: Mapping[str, Params],
        rows: PlainRows | PackedRows,
        who: str,
        view: str,
        guidance: Guidance,
    ) -> tuple[Array, Head, Routing | None]:
        """What a scorer knows just before each target, what makes logits of it, and what its
        routers did.
        """
        if who == NOVELTY:
            # The student's features; its parameters are not what is trained here.
            student = jax.lax.stop_gradient(params["student"])
            error = novelty.error(params[who], self._features(student, rows.batch, view))
            everywhere = (*rows.batch.tokens.shape, error.shape[-1])
            known = rows.targets(jnp.broadcast_to(error[:, None, :], everywhere))
            return known, lambda x, *_: x, None
        model = self.form_of(who)
        known, routing = model._before(params[who], rows, view, guidance)

        def logits(x: Array, temperature: Array, whole: Params) -> Array:
            head = transformer.bind(model.config, {**params[who], **whole})
            if model.config.outputs:
                return head.logits(x)
            if x.dtype == jnp.float32:  # of the few numbers that logits are linear in
                return head.logits(x / temperature[:, None])
            return head.logits(x) / temperature[:, None]

        return known, logits, routing

    def _before(
        self, params: Params, rows: PlainRows | PackedRows, view: str, guidance: Guidance
    ) -> tuple[Array, Routing | None]:
        """Hidden state just before each target, 0 where the view has no such place; and the routing
        of the plain rows' tokens, or of a view's.
        """
        held = rows.batch.held(view)
        if view == "plain":
            shown = rows.shown
            if guidance.recorded is not None:
                guidance = dataclasses.replace(guidance, recorded=rows.inputs(guidance.recorded))
            inputs = shown.tokens, shown.position, shown.segment
            states, routing = self.routed(params, *inputs, guidance, rows.bins)
            return rows.before(states), None if routing is None else rows.told(routing)
        shown = rows.batch.views[view]
        states, routing = self.routed(params, shown.tokens, shown.position, shown.segment, guidance)
        before = jnp.maximum(shown.index - 1, 0)
        states = jnp.take_along_axis(states, before[:, :, None], axis=1)
        return rows.targets(jnp.where(held[:, :, None], states, 0)), routing

    def _features(self, params: Params, batch: Batch, view: str) -> Array:
        """The student's states over a rollout's own action tokens, [row layer embed]."""
        model = transformer.bind(self.config, params)
        if view == "plain":
            shown, mask = batch, batch.acted
        else:
            shown = batch.views[view]
            own = batch.acted & (shown.index >= 0)  # one that nothing predicts still has a state
            place = jnp.where(own, shown.index, shown.tokens.shape[1])
            rows = jnp.arange(place.shape[0])[:, None]
            mask = jnp.zeros(shown.tokens.shape, bool).at[rows, place].set(True, mode="drop")
        return model.features(
            shown.tokens,
            shown.position,
            shown.segment,
            self._by_rows(shown.tokens),
            self.mix,
            mask,
            self._gathered,
        )

    def _chunks(
        self, rows: int, tokens: int
    ) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
        """Functions that cut [row token ...] into [chunk position ...] and join it again.

        A chunk takes a few tokens of every row, or, if the rows alone are too many, every n-th row:
        rows are a device's own.
        """
        limit = self._limit
        strides = next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= limit)
        count = -(-tokens // max(1, limit // (rows // strides)))
        width = -(-tokens // count)

        def cut(x: Array) -> Array:
            x = jnp.pad(
                x, ((0, 0), (0, count * width - tokens)) + ((0, 0),) * (x.ndim - 2), mode="edge"
            )
            x = x.reshape(rows // strides, strides, count, width, *x.shape[2:])
            x = jnp.moveaxis(x, (1, 2), (0, 1))
            return x.reshape(strides * count, rows // strides * width, *x.shape[4:])

        def join(x: Array) -> Array:
            x = x.reshape(strides, count, rows // strides, width, *x.shape[2:])
            x = jnp.moveaxis(x, (0, 1), (1, 2))
            return x.reshape(rows, count * width, *x.shape[4:])[:, :tokens]

        return cut, join


def scorer_name(who: str, view: str) -> str:
    """The key of a scorer's logits: "student" for the student on the plain row, else "who/view"."""
    return who if (who, view) == ("student", "plain") else f"{who}/{view}"


def build(
    config: ModelConfig,
    mesh: Mesh | None,
    rules: Rules,
    others: Mapping[str, ModelConfig] | None = None,
    *,
    answers_only: bool = False,
) -> Policy:
    """A policy, with the forms of the other models that score beside it, that reads answers only or
    whole rows.

    Raises ValueError naming the field, its value and what is allowed if the mesh does not divide
    a model, or a model gives no logits over the student's vocabulary where it should, or asks for
    kernels that are not installed.
    """
    others = others or {}
    for who, form in {"student": config, **others}.items():
        section = "model" if who in ("student", VALUE) else f"scorers.{who}.model"
        if form.kernels == "tokamax":
            tokamax_kernels.require()
        if who != VALUE and form.outputs:
            raise ValueError(f"{section}.outputs={form.outputs}; allowed: 0 (logits)")
        sizes = {
            "embed": ("width", form.width),
            "heads": ("heads", form.heads),
            "kv_heads": ("kv_heads", form.kv_heads),
            "head": ("head_size", form.head_size),
            "mlp": ("hidden", form.hidden),
            "vocab": ("vocab_size", form.vocab_size),
            "layers": ("layers", form.layers),
        }
        if form.experts.count:
            sizes["expert"] = ("experts.count", form.experts.count)
        for logical, (field, value) in sizes.items():
            require_divisible(f"{section}.{field}", value, mesh, rules[logical])
        more = {"local_kv_heads": ("kv_heads", form.local_kv_heads)}
        if form.experts.count:
            more |= {
                "experts.hidden": ("mlp", form.experts.hidden),
                "experts.shared_hidden": ("mlp", form.experts.shared_hidden),
            }
        for field, (logical, value) in more.items():
            require_divisible(f"{section}.{field}", value, mesh, rules[logical])
        if who != VALUE:
            adapters.refuse_misfits(section, form, transformer.shapes(form))
        if form.vocab_size != config.vocab_size:
            raise ValueError(
                f"{section}.vocab_size={form.vocab_size}; allowed: {config.vocab_size}, the "
                "student's (logits are compared id by id)"
            )
    policy = Policy(config, mesh, rules, tuple(sorted(others.items())), answers_only)
    policy.specs  # noqa: B018 - raises if two axes of a parameter claim one mesh axis
    return policy
