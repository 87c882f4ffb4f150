"""Every field there is, with its unit. A method's file starts from here and says what differs.

``get_config("tiny")`` shrinks model, batch and steps for one CPU core; a name of
``configs/models.py`` takes a published model's form. Counts: ``train.groups`` is
groups a step, ``pool.rollouts_per_group`` rollouts a group, ``train.micro_rollouts`` rollouts a
micro-batch.
"""

from ml_collections import ConfigDict

from configs import models

VARIANTS = ("", "tiny", *models.NAMES)

# The house's values of kernels/trust.py's Trust: what a method of PPO's kind does about a policy
# that moved from the take's start, and a sampler that is not quite the policy.
TRUST = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 3.0,  # bound on the ratio where the advantage is negative; inf: none
    "mismatch": "truncate",  # none | truncate | band | rollout_truncate | rollout_band
    "mismatch_low": 0.0,  # lower end of a band
    "mismatch_high": 2.0,  # cap on trainer over sampler probability, or upper end of a band
}


def get_config(variant: str = "") -> ConfigDict:
    """The base configuration. Raises ValueError for an unknown variant."""
    if variant not in VARIANTS:
        raise ValueError(f"config variant {variant!r} is unknown; allowed: {VARIANTS}")
    config = ConfigDict()
    config.seed = 0

    config.model = model = ConfigDict()
    # qwen3 | llama | qwen3_moe | gemma3 | mimo_v2: which published format the weights have; what is
    # computed is said by the fields below
    model.family = "qwen3"
    model.vocab_size = 64  # at least the tokenizer's
    model.layers = 4
    model.width = 128
    model.heads = 4
    model.kv_heads = 2
    model.head_size = 32
    model.hidden = 384  # inner width of the SwiGLU block
    model.rope_theta = 10_000.0
    model.norm_epsilon = 1e-6
    model.tied_head = True
    model.outputs = 0  # 0: logits over the vocabulary; the value's model is this one with 1
    model.dtype = "float32"  # of the compute; log-probs are float32 whatever stands here
    model.param_dtype = "float32"  # of the master weights
    # what of a layer the forward pass keeps, the backward pass computing the rest again: none (all
    # is kept) | full (its input only) | attention (and what attention gives) | projections (and
    # queries, keys, values) | inner (and gate and up) | dots (every matrix product)
    model.remat = "none"
    # of attention over plain rows, and of experts' products; the sampler attends by XLA whatever
    # stands here. auto: on TPU splash where it fits, else xla | xla: plain operations | splash:
    # JAX's kernel for attention, experts as in xla | tokamax: its kernels for both (extra
    # `tokamax`). A kernel asked for by name that does not fit is refused
    model.kernels = "auto"
    model.score_chunk_positions = 2048  # positions whose logits are alive at once
    # whether these are made again in the backward pass; False: a micro-batch's are kept in float32,
    # which saves one of the head's four products
    model.score_remat = True
    model.qk_norm = True  # queries and keys are normalised per head
    model.norm_offset = 0.0  # RMSNorm multiplies with offset + scale
    model.post_norms = False  # what a block gives is normalised before it is added
    model.activation = "silu"  # silu | gelu_tanh
    model.embed_scale = 1.0  # of the embedding
    model.attention_scale = 0.0  # of q k^T; 0: 1 / sqrt(head_size)
    model.value_size = 0  # numbers of a value; 0: head_size
    model.value_scale = 1.0
    model.rope_size = 0  # how many of a head's numbers turn; 0: all
    # of global layers: ("none",), ("linear", factor), or ("llama3", factor, low_freq_factor,
    # high_freq_factor, original_positions)
    model.rope_scaling = ("none",)
    model.local_layers = (0,)  # a pattern repeated over the layers; 1: sliding window
    model.window = 0  # tokens that a local layer sees, itself included
    model.local_rope_theta = 10_000.0
    model.local_kv_heads = 0  # 0: kv_heads
    model.sinks = "none"  # none | local | all: layers with a learned logit in the denominator
    model.experts = experts = ConfigDict()
    experts.count = 0  # 0: a dense model
    experts.per_token = 0
    experts.hidden = 0  # inner width of an expert
    experts.shared_hidden = 0  # of the expert that every token goes through; 0: none
    experts.dense_layers = ()  # layers that keep a dense block
    experts.router = "softmax"  # softmax | sigmoid (with a bias that only chooses)
    experts.normalise = True  # the gates of a token's experts sum to 1
    experts.scale = 1.0  # of the gates
    # low-rank additions to linear kernels (LoRA); rank 0: none. The rest is then frozen, unless
    # optimizer.train says otherwise; see configs/lora.py
    model.adapter = adapter = ConfigDict({"rank": 0})
    adapter.alpha = 16.0  # what they add is scaled by alpha / rank
    adapter.pattern = "attention|mlp"  # regular expression searched in the names of linears
    adapter.dtype = "float32"  # of the factors, which may be finer than param_dtype

    config.mesh = mesh = (
        ConfigDict()
    )  # devices on each axis; their product must be the number of devices used
    mesh.data = 1
    mesh.fsdp = 1
    mesh.tensor = 1
    mesh.expert = 1
    mesh.context = 1

    config.task = task = ConfigDict()
    task.source = (
        "jaxrl.tasks.reasoning"  # dotted name of a module with a TaskSource called `Source`
    )
    task.family = "chain_sum"  # a Reasoning Gym data set
    task.parameters = ConfigDict(
        {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 2}, convert_dict=False
    )
    task.seed = 0  # of the data set, not of the run: all seeds of a run share questions and splits
    task.train_prompts = 8192  # distinct questions
    task.held_out_prompts = 512
    task.held_out_fraction = 0.1  # of the space of content hashes
    task.reward = "exact"  # exact: 1 if score >= 1 else 0 | score: as the verifier gives it

    config.pool = pool = ConfigDict()
    # local: generate and verify in this process | recorded: read from pool.path | remote: workers
    # and engines in other processes, behind a gateway
    pool.kind = "local"
    # recorded: directory of records, or an earlier phase, whose best rollouts are read (see
    # jaxrl/pool/filtering.py); "" means demonstrations made from the task's train split
    pool.path = ""
    pool.survivors = 500  # of an earlier phase: most problems that are read, a rollout each
    pool.loop_characters = 40  # no survivor says a span so long ...
    pool.loop_repeats = 4  # ... so many times in a row
    # local: the part of the train prompts that is drawn, by content hash, of so many parts
    pool.shard = 0
    pool.shards = 1
    pool.local_dir = ""  # where records of this run go (a local disk); "" means <workdir>/pool
    pool.rollouts_per_group = 8
    # recorded: most right answers of the task that are shown; 0: all of its train split
    pool.demonstrations = 0
    # recorded, remote: passes over the records or prompts, then the phase ends; 0 means no end
    pool.epochs = 0
    pool.publish_every_steps = 1  # weights to the pool; 0: at the end of a phase only
    pool.max_refills = (
        4  # rounds of refilling for groups that the algorithm refuses, then fewer are trained
    )
    pool.max_feedback_tokens = 0  # of what the environment answers; 0: it is not kept
    pool.record = True  # keep the rollouts on disk
    # of the task's text: "sentencepiece", "characters", "character_pairs"; or a published one: a
    # path with a / to a checkpoint's directory, its tokenizer.json or .model, or a GGUF file
    pool.tokenizer = "sentencepiece"
    pool.tokenizer_vocab_size = 64  # sentencepiece: most pieces
    # template: a prompt is a user's message, rendered by the published chat template | off: a text
    pool.chat = "off"
    pool.system = ""  # template: the system's message before it; "": none
    # seconds that one call (generate, verify, load) may last, or a remote pool without news
    pool.watchdog_s = 600.0
    # The rest is for pool.kind="remote".
    # sqlite: a file in the pool's folder (a local disk) | postgresql://user@host/database
    pool.ledger = "sqlite"
    pool.staleness = 0  # steps that a token's weights may be behind its update; 0: synchronous
    # groups that grow older: "drop" (sampled anew once, then replaced; shifts to what is quick) |
    # "wait" (the trainer idles so that none does; after a rollback: sampled anew) | "continue"
    # (their old tokens are not trained)
    pool.over_age = "drop"
    pool.lease_s = 60.0  # seconds after which a silent worker's sample goes to another one
    pool.max_attempts = 3  # of a sample that infrastructure fails; then its group is replaced
    # samples that make a group when infrastructure failed the others; 0: all of them
    pool.min_group = 0
    pool.poll_s = 0.05  # seconds between the trainer's looks at the ledger while it waits
    pool.gateway = ""  # where it listens; "": the run starts one on this machine
    # sampler: in the gateway's process | serve:URL, vllm:URL, sglang:URL: servers, by commas
    pool.engine = "sampler"
    # sampler: tokens of an answer after which new weights and other requests may join; 0: a batch
    # is finished first. The prompt and what was answered are then read again
    pool.chunk_tokens = 0
    pool.launcher = "subprocess"  # of workers: subprocess | ray | none (started by hand)
    pool.workers = 2
    # what a worker does with a task: "": one question, one completion; else the dotted name of an
    # agent, a function that gets a base URL and a key
    pool.harness = ""
    pool.max_body_bytes = 8 * 2**20  # of a request to the gateway
    # Attempts that may be under way at a gateway (leased, not sealed). "aimd": as many as the
    # engines bear, which are asked about once a second; "fixed": pool.under_way; "auto": aimd for
    # vllm and sglang, whose cache grows with the answers until one must be computed again; fixed
    # for the sampler and serve, which hold the cache of all slots from the beginning: to keep slots
    # empty would gain nothing
    pool.admission = "auto"
    pool.under_way = 0  # most of them, aimd or fixed; 0: no bound but the groups that are open
    # Permits that an attempt needs besides, over all gateways and workers; 0: any number. It holds
    # them from its lease to its seal or failure, or until its lease runs out: of a source whose
    # verdicts need a sandbox or a judge, no more attempts are under way at all. Where whole groups
    # are judged the trainer does so, one after the other, as the pool in this process does: either
    # is within any limit
    pool.judge_calls = 0  # verdicts at once that ask something which costs (a source's ``needs``)
    pool.sandboxes = 0  # verdicts at once that run programs
    # bytes on disk of what is sealed and not covered by a checkpoint yet; from there on no attempt
    # begins but those of groups that the trainer waits for. By default what is under way is bounded
    # by the groups that are open, and what stays on disk by pool.record
    pool.spool_bytes = 0
    # aimd, shares of an engine's KV cache: below the first the limit grows, while attempts come up
    # to it and nothing waits; from the second on nothing new begins until enough have ended; from
    # the third on, or when an engine has preempted, the youngest groups are given back
    pool.usage_marks = (0.7, 0.8, 0.9)
    # pairs of a regular expression searched in a universe's name (task.source of a task) and the
    # largest share of the groups that it may have under way, as in (("code/", 0.5),); the first
    # that is found counts, and it must be found somewhere
    pool.quotas = ()

    config.sampler = sampler = ConfigDict()
    sampler.temperature = 1.0  # > 0; greedy is refused for training
    sampler.max_new_tokens = 8
    sampler.prompt_buckets = (32,)  # prompt lengths that are compiled; the longest is the limit
    sampler.slots = 256  # sequences decoded side by side
    sampler.record_routes = False  # keep the experts that each token went through

    config.algorithm = ConfigDict(
        {"name": "grpo"}
    )  # name and the fields of jaxrl/algorithms/<name>.py
    # Models besides the student, for the algorithms that read them. `optimizer` and `model` hold
    # the fields that differ from the sections of that name.
    config.scorers = scorers = ConfigDict()
    scorers.self = ConfigDict({"ema_rate": 0.99})  # of the old average, after every update
    scorers.teacher = teacher = ConfigDict()
    teacher.weights = ""  # an earlier phase (its last student) or a directory of weights
    # own: all of its weights are its own | student: of its weights the adapters are read, over the
    # student's base, which is frozen and held once; they begin as the student's if weights is ""
    teacher.base = "own"
    # "": the run's own; else the teacher reads the responses' text in its own tokens
    teacher.tokenizer = ""
    teacher.model = ConfigDict()
    teacher.optimizer = ConfigDict()
    scorers.value = ConfigDict({"optimizer": ConfigDict()})
    scorers.novelty = ConfigDict({"hidden": 512, "optimizer": ConfigDict()})
    scorers.views = ConfigDict()  # name: template, see jaxrl/train/views.py

    config.optimizer = optimizer = ConfigDict()
    optimizer.name = "adamw"  # adamw | sgd
    optimizer.learning_rate = 3e-4
    optimizer.warmup_updates = 10
    optimizer.decay_updates = 0  # cosine to final_fraction after warm-up; 0 keeps the rate constant
    optimizer.final_fraction = 0.1
    optimizer.b1 = 0.9
    optimizer.b2 = 0.95
    optimizer.epsilon = 1e-8
    optimizer.weight_decay = 0.0
    # bfloat16: half the memory of adamw's two averages, rounded stochastically
    optimizer.moments = "float32"
    # of weights in bfloat16: "nearest" (small changes are lost) | "stochastic" (kept on average) |
    # "masters" (a float32 copy takes the changes; 4 more bytes a weight)
    optimizer.rounding = "nearest"
    optimizer.clip_norm = 1.0  # global norm of the gradient
    # adapters: they alone (and the output of a value) | base: all but them | all | auto: adapters
    # if the model has any, else all
    optimizer.train = "auto"
    # regular expressions searched in parameter names: no gradient, no moments, no update, whatever
    # train says
    optimizer.freeze = ()
    # pairs of a regular expression searched in parameter names and a factor of the learning rate,
    # as in (("router/", 30.0),); the first that is found counts, and it must be found somewhere
    optimizer.rates = ()

    config.train = train = ConfigDict()
    train.steps = 100
    train.groups = 64
    train.epochs = 1
    train.minibatches = 1  # updates an epoch, cut at group borders
    train.micro_rollouts = 512  # rollouts whose activations are alive at once
    train.token_buckets = (48,)  # row lengths that are compiled; the longest is the limit
    train.view_token_buckets = ()  # the same for rows of views
    # plain: a row of the trunk is a rollout | packed: a group, whose common prompt is there once,
    # before bins in which what is left of its rollouts lies side by side (micro_rollouts is then
    # whole groups); see jaxrl/train/packing.py. A take gets the smallest compiled shape that holds
    # it, or plain rows
    train.packing = packing = ConfigDict({"rows": "plain"})
    packing.prefix_buckets = ()  # tokens of the common prompt; (): sampler.prompt_buckets
    # tokens of a bin, which holds whole rests; (): sampler.max_new_tokens + max_feedback_tokens
    packing.bin_buckets = ()
    packing.bins = ()  # bins of a group, besides as many as it has rollouts
    # weights to start from: "": those of the phase before (new ones, if there is none); "fresh":
    # new ones; an earlier phase: its last student; or a directory of weights
    train.start = ""
    train.adapters = ""  # a directory of adapters, saved alone, to lay over those weights; "": none
    # experts of a token: "free": the routers choose | "replayed": those that the sampler recorded
    # (sampler.record_routes), with the gates of the current router
    train.routes = "free"
    # of the loss that evens the experts' loads, a token; 0: none, and none beside frozen routers
    train.balance_weight = 0.0
    # Which universes (task.source of a task) are drawn; see jaxrl/train/curriculum.py. off: all
    # tasks in turn | fixed: universes equally often | bounded: more of those where more is lost
    train.curriculum = curriculum = ConfigDict({"move": "off"})
    curriculum.signal = "loss"  # loss | progress: what was gained since a universe was last drawn
    curriculum.stay = 1.0  # weight of KL(q', q) against the signal
    curriculum.home = 0.1  # weight of KL(q', uniform)
    curriculum.kappa = 0.02  # nats: most that q may move in a take
    curriculum.rules = ()  # programs that pick among a group's answers, for praxis
    curriculum.archive_rate = 0.5  # of a take's utility on a rule's score; 0: weights stay equal
    curriculum.sharpness = 1.0  # of the scores in the rules' weights
    curriculum.harm = 1.0  # of a right answer turned wrong, against one made right

    # A phase ends early, and says why, when a curve was out of bounds in so many takes in a row.
    train.stop = stop = ConfigDict({"takes": 5})
    stop.entropy_below = 0.0  # nats a token, of loss/entropy_mean; 0: never
    stop.kl_above = float("inf")  # nats a token; inf: never
    stop.kl = ""  # the curve that kl_above bounds, such as loss/anchor_kl_mean

    config.eval = evaluation = ConfigDict()
    evaluation.every_steps = 0  # 0: before and after only
    evaluation.prompts = 512
    # first questions of the train split, measured before and after, counted apart; 0: none
    evaluation.seen_prompts = 0
    evaluation.samples = 4  # k of avg@k and pass@k
    evaluation.temperature = 1.0

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every_steps = 25
    checkpoint.keep = 2  # the newest
    checkpoint.keep_every_steps = 0  # and for good those at multiples of this; 0: none
    checkpoint.keep_weights = 2  # published weight directories, the newest
    checkpoint.keep_best = True  # and those with the best held-out avg@k so far

    config.log = log = ConfigDict()
    log.every_steps = 1
    log.samples = 4  # rollouts shown as text
    log.samples_every_steps = 10
    log.device_flops = 0.0  # of a device, for throughput/mfu; 0: as published, none of a CPU

    # Phases run in this order on the same weights; phases.<name> overrides sections for that one.
    config.phases = ConfigDict({"order": ("main",), "main": ConfigDict()})

    if variant == "tiny":
        model.update(
            layers=2,
            width=32,
            heads=2,
            kv_heads=1,
            head_size=16,
            hidden=64,
            score_chunk_positions=256,
        )
        task.update(train_prompts=64, held_out_prompts=16)
        pool.update(rollouts_per_group=4)
        sampler.update(max_new_tokens=4, slots=16)
        train.update(steps=2, groups=4, micro_rollouts=16)
        evaluation.update(prompts=8, samples=2)
        checkpoint.every_steps = 1
    if variant in models.NAMES:
        models.fill(config, variant)
    return config
