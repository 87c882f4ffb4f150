"""Losses of other trainers as functions of arrays: their own code with the model's pass taken out.

Each builder imports an *installed* peer and returns {case: arrays -> (loss, gradient by logp)}; a
case of advantages has them in the place of the gradient. What a case means stands in
peers_losses.py, whose kernels are the other side. Nothing of a peer is needed by jaxrl itself.
"""

import importlib
import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BETA = 0.04  # of the KL term
GROUP = 8

Arrays = Mapping[str, np.ndarray]
Answer = tuple[float, np.ndarray]
Cases = Mapping[str, Callable[[Arrays], Answer]]


def _torch_answer(x: Arrays, loss: Callable[[Any, Mapping[str, Any]], Any]) -> Answer:
    torch = importlib.import_module("torch")
    tensors = {
        name: torch.from_numpy(np.asarray(value).copy())
        for name, value in x.items()
        if name != "group"
    }
    tensors["mask"] = tensors["mask"].float()
    logp = tensors["logp"].requires_grad_()
    value = loss(logp, tensors)
    value.backward()
    return float(value.detach()), logp.grad.numpy()


def _verl_policy(core: Any) -> Callable[..., Callable[[Arrays], Answer]]:
    """A policy loss by its name, its aggregation, its clips and its rollout correction."""
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    actor = importlib.import_module("verl.workers.config").ActorConfig

    def policy(name: str, how: str, *, low=0.2, high=0.2, dual=1e9, beta=0.0, **correction: Any):
        numbers = actor(
            strategy="fsdp",
            clip_ratio=low,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=dual,
            rollout_n=GROUP,
            ppo_micro_batch_size_per_gpu=1,
        )

        def loss(logp: Any, t: Mapping[str, Any]) -> Any:
            weight = None
            if correction:
                weight, _ = helper.compute_rollout_correction_weights(
                    t["old"] - t["sampler"], t["mask"], **correction
                )
            advantage = t["advantage"][:, None].expand_as(logp)
            arguments = (t["old"], logp, advantage, t["mask"], how, numbers, weight)
            term = core.get_policy_loss_fn(name)(*arguments)[0]
            if beta:
                distance = core.kl_penalty(logp, t["ref"], "low_var_kl")
                term = term + beta * core.agg_loss(distance, t["mask"], how)
            return term

        return lambda x: _torch_answer(x, loss)

    return policy


def _verl_advantage(
    estimate: Callable[..., Any], *, spread: bool = False, **more: Any
) -> Callable[[Arrays], Answer]:
    """Advantages of each row; ``spread``: of each token, the reward on the last, reached by
    returns.
    """
    torch = importlib.import_module("torch")

    def answer(x: Arrays) -> Answer:
        mask = torch.from_numpy(x["mask"].astype(np.float32))
        scores = torch.zeros(mask.shape)
        place = mask.sum(-1).long() - 1 if spread else torch.zeros(len(mask)).long()
        scores[torch.arange(len(mask)), place] = torch.from_numpy(x["reward"])
        names = {} if spread else {"index": x["group"]}
        found = estimate(scores, mask, **names, **more)[0].numpy()
        return 0.0, found if spread else found[:, 0]

    return answer


def verl() -> Cases:
    """verl.trainer.ppo.core_algos and rollout_corr_helper."""
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    policy, advantage = _verl_policy(core), _verl_advantage

    def distance(kind: str):
        return lambda x: _torch_answer(
            x,
            lambda logp, t: core.agg_loss(
                core.kl_penalty(logp, t["ref"], kind), t["mask"], "token-mean"
            ),
        )

    vanilla, mean, rollouts = "vanilla", "token-mean", "seq-mean-token-mean"
    return {
        "grpo": policy(vanilla, rollouts),
        "grpo + k3": policy(vanilla, rollouts, beta=BETA),
        "dapo": policy(vanilla, mean, high=0.28, dual=3.0),
        "dapo, no dual clip": policy(vanilla, mean, high=0.28),
        "dr. grpo": policy(vanilla, "seq-mean-token-sum-norm"),
        "gspo": policy("gspo", rollouts, low=0.02, high=0.03),
        "cispo, cap 1.2": policy("cispo", mean, low=0.9999, high=0.2),
        "cispo, 1 -+ 0.2": policy("cispo", mean),
        "tis, token": policy(vanilla, mean, rollout_is="token", rollout_is_threshold=2.0),
        "tis, rollout": policy(vanilla, mean, rollout_is="sequence", rollout_is_threshold=2.0),
        "icepop": policy(vanilla, mean, rollout_is="token", rollout_is_threshold="0.5_2.0"),
        "k1": distance("k1"),
        "k2": distance("k2"),
        "k3": distance("k3"),
        "advantage, grpo": advantage(core.compute_grpo_outcome_advantage),
        "advantage, dr. grpo": advantage(
            core.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False
        ),
        "advantage, rloo": advantage(core.compute_rloo_outcome_advantage),
        "advantage, reinforce++": advantage(
            core.compute_reinforce_plus_plus_outcome_advantage,
            spread=True,
            config=types.SimpleNamespace(gamma=1.0),
        ),
    }


def trl() -> Cases:
    """trl.GRPOTrainer._compute_loss; its advantages are inside of the generation and not
    callable."""
    trainer = importlib.import_module("trl").GRPOTrainer
    torch = importlib.import_module("torch")
    space = types.SimpleNamespace

    def policy(kind: str, *, high=0.2, low=0.2, level="token", beta=0.0, tis=False):
        def loss(logp: Any, t: Mapping[str, Any]) -> Any:
            alone = space(
                gather=lambda x: x,
                reduce=lambda x, reduction: x,
                gather_for_metrics=lambda x: x,
                num_processes=1,
            )
            stub = space(
                accelerator=alone,
                args=space(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
                aux_loss_enabled=False,
                top_entropy_quantile=1.0,
                off_policy_mask_threshold=None,
                importance_sampling_level=level,
                beta=beta,
                loss_type=kind,
                epsilon_low=low,
                epsilon_high=high,
                use_vllm=tis,
                vllm_importance_sampling_correction=tis,
                vllm_importance_sampling_mode="token_truncate",
                model=space(training=True),
                current_gradient_accumulation_steps=1,
                _entropy_bonus_enabled=False,
                _metrics={"train": defaultdict(list)},
                max_completion_length=logp.shape[1],
                _get_per_token_logps_and_entropies=lambda *a, **k: (logp, 0 * logp.detach(), None),
            )
            ids = torch.zeros(logp.shape, dtype=torch.long)
            inputs = {
                "prompt_ids": ids[:, :1],
                "prompt_mask": t["mask"][:, :1],
                "completion_ids": ids,
                "completion_mask": t["mask"],
                "advantages": t["advantage"],
                "old_per_token_logps": t["old"],
                "ref_per_token_logps": t["ref"],
                "num_items_in_batch": t["mask"].sum(),
                "sampling_per_token_logps": t["sampler"],
                "importance_sampling_ratio": (t["old"] - t["sampler"]).exp().clamp(max=2.0),
            }
            return trainer._compute_loss(stub, None, inputs)

        return lambda x: _torch_answer(x, loss)

    return {
        "grpo": policy("grpo"),
        "grpo + k3": policy("grpo", beta=BETA),
        "dapo, no dual clip": policy("dapo", high=0.28),
        "dr. grpo": policy("dr_grpo"),
        "gspo": policy("grpo", low=0.02, high=0.03, level="sequence"),
        "cispo, cap 1.2": policy("cispo", high=0.2),
        "tis, token": policy("dapo", tis=True),
    }


def _jax_answer(x: Arrays, loss: Callable[[jax.Array], jax.Array]) -> Answer:
    value, slope = jax.value_and_grad(loss)(jnp.asarray(x["logp"]))
    return float(value), np.asarray(slope)


def _tunix_policy(core: Any, common: Any) -> Callable[..., Callable[[Arrays], Answer]]:
    """The GRPO loss by its aggregation, ratio, clips, KL term and weights for the sampler."""
    nnx = importlib.import_module("flax.nnx")
    space = types.SimpleNamespace

    class Nothing(nnx.Module):
        """A model that is not asked."""

        def __init__(self) -> None:
            self.w = nnx.Param(jnp.zeros(1))

    def policy(how: str, *, algo="grpo", low=0.2, high=0.2, dual=None, beta=0.0, tis=False):
        numbers = space(
            beta=beta,
            epsilon=low,
            epsilon_high=high,
            epsilon_c=dual,
            loss_algo=algo,
            loss_agg_mode=how,
            temperature=1.0,
            kl_loss_mode="low_var_kl",
            kl_clamp_value=None,
        )

        def loss(logp: jax.Array, x: Arrays) -> jax.Array:
            mask = jnp.asarray(x["mask"]).astype(jnp.int32)
            weight = jnp.minimum(jnp.exp(jnp.asarray(x["old"] - x["sampler"])), 2.0)
            example = space(
                prompt_ids=None,
                completion_ids=mask,
                completion_mask=mask,
                advantages=jnp.asarray(x["advantage"]),
                old_per_token_logps=jnp.asarray(x["old"]),
                ref_per_token_logps=jnp.asarray(x["ref"]),
                sampler_is_weights=weight if tis else None,
            )
            kept = common.compute_per_token_logps
            common.compute_per_token_logps = lambda *a, **k: (logp, jnp.zeros((*logp.shape, 2)))
            try:
                return core.grpo_loss_fn(Nothing(), example, numbers, 0, 1)[0]
            finally:
                common.compute_per_token_logps = kept

        return lambda x: _jax_answer(x, lambda logp: loss(logp, x))

    return policy


def tunix() -> Cases:
    """tunix.rl.algo_core and common."""
    core = importlib.import_module("tunix.rl.algo_core")
    common: Any = importlib.import_module("tunix.rl.common")
    policy = _tunix_policy(core, common)

    def distance(kind: str):
        def loss(logp: jax.Array, x: Arrays) -> jax.Array:
            each = common.compute_kl_divergence(logp, jnp.asarray(x["ref"]), kind)
            return common.aggregate_loss(each, jnp.asarray(x["mask"], jnp.int32), "token-mean")

        return lambda x: _jax_answer(x, lambda logp: loss(logp, x))

    def advantage(estimate: Callable[..., Any]):
        def answer(x: Arrays) -> Answer:
            size = int((x["group"] == x["group"][0]).sum())
            return 0.0, np.asarray(estimate(x["reward"], size))

        return answer

    rollouts = "sequence-mean-token-mean"
    return {
        "grpo": policy(rollouts),
        "grpo + k3": policy(rollouts, beta=BETA),
        "dapo": policy("token-mean", high=0.28, dual=3.0),
        "dapo, no dual clip": policy("token-mean", high=0.28),
        "dr. grpo": policy("sequence-mean-token-scale"),
        "gspo": policy(rollouts, algo="gspo-token", low=0.02, high=0.03),
        "tis, token": policy("token-mean", tis=True),
        "k1": distance("kl"),
        "k2": distance("mse_kl"),
        "k3": distance("low_var_kl"),
        "advantage, grpo": advantage(core.compute_advantages),
        "advantage, dr. grpo": advantage(core.compute_drgrpo_advantages),
        "advantage, rloo": advantage(core.compute_rloo_advantages),
    }


def easydel() -> Cases:
    """easydel.trainers.group_relative_policy_optimization, one evaluation step."""
    module: Any = importlib.import_module("easydel.trainers.group_relative_policy_optimization._fn")
    space = types.SimpleNamespace
    module.extract_generation_model_kwargs = lambda *a, **k: {}
    module.with_sharding_constraint = lambda arr, sharding: arr  # there is no mesh

    def policy(kind: str, *, low=0.2, high=0.2, level="token", beta=0.0):
        def loss(logp: jax.Array, x: Arrays) -> jax.Array:
            module.get_per_token_logps = lambda *a, **k: logp
            ids = jnp.zeros(logp.shape, jnp.int32)
            batch = {
                "prompt_ids": ids[:, :1],
                "prompt_mask": ids[:, :1] + 1,
                "completion_ids": ids,
                "completion_mask": jnp.asarray(x["mask"], jnp.int32),
                "advantages": jnp.asarray(x["advantage"]),
                "old_per_token_logps": jnp.asarray(x["old"]),
                "ref_per_token_logps": jnp.asarray(x["ref"]),
            }
            state = space(graphstate=None, merge=lambda tree: space(__call__=None))
            return module.grpo_step(
                state,
                batch,
                num_generations=1,
                beta=beta,
                is_training=False,
                loss_type=kind,
                epsilon=low,
                epsilon_high=high,
                importance_sampling_level=level,
            ).loss

        return lambda x: _jax_answer(x, lambda logp: loss(logp, x))

    return {
        "grpo": policy("grpo"),
        "grpo + k3": policy("grpo", beta=BETA),
        "dapo, no dual clip": policy("dapo", high=0.28),
        "dr. grpo": policy("dr_grpo"),
        "gspo": policy("grpo", low=0.02, high=0.03, level="sequence"),
        "cispo, cap 1.2": policy("cispo", high=0.2),
    }


PEERS: Mapping[str, tuple[str, Callable[[], Cases]]] = {
    "verl": ("verl", verl),
    "trl": ("trl", trl),
    "tunix": ("google-tunix", tunix),
    "easydel": ("easydel", easydel),
}
