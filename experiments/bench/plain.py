"""Plain JAX by hand: what a careful reader of the formulas writes in an hour, and no more.

Scanned layers, grouped attention as one einsum over tokens and heads, the head in checkpointed
chunks of positions, AdamW behind a clip from optax; a decoding loop over a cache of just the
length. Needs jax and optax.
"""

import argparse
import functools
from typing import Any

import numpy as np

from experiments.bench import work
from experiments.bench.work import Run

Given = argparse.Namespace


class Plain:
    """By hand in jax; parameters are ``(embedding, last norm, stacked blocks)``."""

    def __init__(self, given: Given) -> None:
        self.jax, self.size = work.module("jax"), work.SIZES[given.size]
        self.np = work.module("jax.numpy")
        named, layers = work.weights(self.size), range(self.size.layers)

        def stacked(name: str) -> Any:
            each = [named[f"model.layers.{layer}.{name}.weight"] for layer in layers]
            return self.np.stack([x.T for x in each])

        names = ("q", "k", "v", "o")
        blocks = {name: stacked(f"self_attn.{name}_proj") for name in names}
        blocks |= {f"{name}_norm": stacked(f"self_attn.{name}_norm") for name in ("q", "k")}
        blocks |= {name: stacked(f"mlp.{name}_proj") for name in ("gate", "up", "down")}
        blocks["before"] = stacked("input_layernorm")
        blocks["between"] = stacked("post_attention_layernorm")
        first, last = named["model.embed_tokens.weight"], named["model.norm.weight"]
        self.params: Any = (self.np.asarray(first), self.np.asarray(last), blocks)

    def norm(self, x: Any, scale: Any) -> Any:
        """Over the last axis."""
        mean = (x * x).mean(-1, keepdims=True)
        return x * self.jax.lax.rsqrt(mean + work.EPSILON) * scale

    def turned(self, x: Any, place: Any) -> Any:
        """Rotary positions of [row token head size]."""
        half = x.shape[-1] // 2
        angle = place[..., None, None] * work.THETA ** -(self.np.arange(half) / half)
        cos, sin = self.np.cos(angle), self.np.sin(angle)
        a, b = x[..., :half], x[..., half:]
        return self.np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def block(self, x: Any, own: Any, place: Any, seen: Any, kept: Any = None) -> tuple[Any, Any]:
        """x after a block, and its keys and values; those go into ``kept`` at a place, if given."""
        np_, size, (rows, tokens, _) = self.np, self.size, x.shape
        inner = self.norm(x, own["before"])

        def heads(name: str) -> Any:
            return (inner @ own[name]).reshape(rows, tokens, -1, size.head_size)

        query = self.turned(self.norm(heads("q"), own["q_norm"]), place)
        key, value = self.turned(self.norm(heads("k"), own["k_norm"]), place), heads("v")
        if kept is not None:
            (keys, values), at = kept
            key = self.jax.lax.dynamic_update_slice(keys, key, (0, at, 0, 0))
            value = self.jax.lax.dynamic_update_slice(values, value, (0, at, 0, 0))
        query = query.reshape(rows, tokens, size.kv_heads, -1, size.head_size)
        scores = np_.einsum("atkgd,askd->akgts", query, key) * size.head_size**-0.5
        weight = self.jax.nn.softmax(np_.where(seen[:, None, None], scores, -1e30), axis=-1)
        found = np_.einsum("akgts,askd->atkgd", weight, value).reshape(rows, tokens, -1)
        x = x + found @ own["o"]
        inner = self.norm(x, own["between"])
        gated = self.jax.nn.silu(inner @ own["gate"]) * (inner @ own["up"])
        return x + gated @ own["down"], (key, value)

    def logp(self, hidden: Any, table: Any, taken: Any, chunk: int = 512) -> Any:
        """log softmax of [position] tokens, in chunks whose logits are computed again."""
        count = hidden.shape[0]
        pad = -count % chunk
        hidden = self.np.pad(hidden, ((0, pad), (0, 0))).reshape(-1, chunk, hidden.shape[-1])
        taken = self.np.pad(taken, (0, pad)).reshape(-1, chunk)

        @self.jax.checkpoint
        def one(piece: Any) -> Any:
            logits = piece[0] @ table.T
            chosen = self.np.take_along_axis(logits, piece[1][:, None], -1)[:, 0]
            return chosen - self.jax.nn.logsumexp(logits, -1)

        return self.jax.lax.map(one, (hidden, taken)).reshape(-1)[:count]

    def objective(self, params: Any, batch: Any) -> Any:
        """The clipped surrogate's mean over rollouts; one update a take, so the ratio is 1."""
        np_, (table, last, blocks) = self.np, params
        asked = batch["prompt"].shape[1]
        tokens = np_.concatenate([batch["prompt"], batch["answer"]], 1)
        mask = np_.concatenate([batch["prompt_mask"], batch["answer_mask"]], 1) > 0
        place = np_.maximum(np_.cumsum(mask, 1) - 1, 0)
        seen = np_.tri(tokens.shape[1], dtype=bool)[None] & mask[:, None]
        step = lambda x, own: (self.block(x, own, place, seen)[0], None)  # noqa: E731
        x = self.norm(self.jax.lax.scan(step, table[tokens], blocks)[0], last)[:, asked - 1 : -1]
        logp = self.logp(x.reshape(-1, x.shape[-1]), table, batch["answer"].reshape(-1))
        logp = logp.reshape(batch["answer"].shape)
        ratio, advantage = np_.exp(logp - self.jax.lax.stop_gradient(logp)), batch["advantage"]
        each = -np_.minimum(ratio * advantage, np_.clip(ratio, 0.8, 1.2) * advantage)
        counted = batch["answer_mask"].sum(1)
        return ((each * batch["answer_mask"]).sum(1) / np_.maximum(counted, 1)).mean()

    def step(self, given: Given) -> Run:
        """AdamW behind a clip."""
        jax, np_ = self.jax, self.np
        taken = work.take(self.size, given.rows, given.tokens, given.prompt, given.ragged)
        batch = {name: np_.asarray(x) for name, x in vars(taken).items()}
        batch["advantage"] = np_.asarray(taken.advantage)[:, None]
        adam = work.module("optax").adamw(work.RATE, weight_decay=0.0)
        chain = work.module("optax").chain(work.module("optax").clip_by_global_norm(1.0), adam)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, moments: Any) -> Any:
            loss, grads = jax.value_and_grad(self.objective)(params, batch)
            changes, moments = chain.update(grads, moments, params)
            norm = work.module("optax").tree.norm(grads)
            return work.module("optax").apply_updates(params, changes), moments, loss, norm

        held = [self.params, jax.jit(chain.init)(self.params)]
        self.params = None

        def run() -> dict[str, float]:
            *held[:], loss, norm = step(*held)
            return {"loss": float(loss), "grad_norm": float(norm)}

        return run

    def generation(self, given: Given) -> Run:
        """A prefill, then a loop over a cache of just the length."""
        jax, np_, size = self.jax, self.np, self.size
        (table, last, blocks), new = self.params, given.new
        taken = work.take(size, given.rows, given.prompt + 8, given.prompt, False)
        owns = [jax.tree.map(lambda x, i=i: x[i], blocks) for i in range(size.layers)]

        def drawn(x: Any, key: Any) -> Any:
            logits = self.norm(x, last) @ table.T
            return logits.argmax(-1) if given.greedy else jax.random.categorical(key, logits)

        @jax.jit
        def generate(prompt: Any) -> Any:
            rows, asked = prompt.shape
            whole = np_.arange(asked + new)
            seen = np_.broadcast_to(
                whole[None, :] <= whole[:asked, None], (rows, asked, len(whole))
            )
            x, kept, key = table[prompt], [], jax.random.key(0)
            empty = np_.zeros((rows, len(whole), size.kv_heads, size.head_size))
            place = np_.broadcast_to(whole[:asked], prompt.shape)
            for own in owns:
                x, pair = self.block(x, own, place, seen, ((empty, empty), 0))
                kept.append(pair)

            def body(i: Any, carry: Any) -> Any:
                kept, token, found = carry
                x, after, at = table[token][:, None], [], asked + i - 1
                seen = np_.broadcast_to(whole <= at, (rows, 1, len(whole)))
                for own, pair in zip(owns, kept, strict=True):
                    x, pair = self.block(x, own, np_.full((rows, 1), at), seen, (pair, at))
                    after.append(pair)
                token = drawn(x[:, 0], jax.random.fold_in(key, i))
                return after, token, found.at[:, i].set(token)

            token = drawn(x[:, -1], key)
            found = np_.zeros((rows, new), int).at[:, 0].set(token)
            return jax.lax.fori_loop(1, new, body, (kept, token, found))[2]

        prompt = np_.asarray(taken.prompt)
        return lambda: work.sameness(np.asarray(generate(prompt)))

    def head(self, given: Given) -> Run:
        """Log-probs from states, or their gradient by states and table."""
        hidden, table, taken = (self.np.asarray(x) for x in work.head_arrays(given))
        mean = lambda h, t: self.logp(h, t, taken).mean()  # noqa: E731
        if given.gradient:
            mean = self.jax.value_and_grad(mean, (0, 1))
        ready = self.jax.jit(mean)

        def run() -> dict[str, float]:
            found = self.jax.block_until_ready(ready(hidden, table))
            return {"mean": float(found[0] if given.gradient else found)}

        return run
