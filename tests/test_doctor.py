"""The doctor: each rule speaks up about the fault it is for, put into a real run, and none about runs that are in order."""

import dataclasses
import json
import math
import re
from collections import deque
from functools import partial
from operator import attrgetter
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import accelerate.scheduler
import numpy
import pytest
import torch
from test_advice import SOURCE
from tiny_models import TINY, VOCABULARY, tiny_model
from torch.utils.data import DataLoader
from transformers import AutoModel, DynamicCache, T5Config, Trainer, TrainingArguments, get_scheduler

from hf_normswap import (
    NormMorph,
    NormSwapError,
    TrainingDoctor,
    convert_checkpoint,
    parameter_groups,
    training_defaults,
)
from hf_normswap.doctor import RULES
from hf_normswap.modeling.architectures import get_architecture
from hf_normswap.symptoms import Model, Run
from hf_normswap.training import RunArguments, make_accelerator, train

PLACEMENTS = ("post", "pre", "deepnorm", "resi_dual", "gated")


def make(case, placement=None, **options):
    """A random model as one is initialised for training, in a placement."""
    model = tiny_model(case, initializer_range=0.02, **options).train()
    return model if placement is None else convert_checkpoint(model, placement)


def batches(steps, rows=4, seed=0, same=False):
    """Sequences that repeat two tokens, which a model can learn; or the same one in every batch."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        if same:
            generator.manual_seed(seed)
        ids = torch.randint(4, VOCABULARY, (rows, 2), generator=generator).repeat(1, 4)
        yield {"input_ids": ids, "labels": ids}


def run(model, steps=3, rate=1e-3, warmup=0, clip=1.0, groups=None, scheduler=None, evaluate=None, rates=None, **data):
    """Train a model in a plain loop, under the eyes of a doctor."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(groups or parameter_groups(model, model, rate, 0.01), lr=rate, fused=True)
    schedule = get_scheduler("constant_with_warmup", optimizer, warmup)
    stepper = schedule if scheduler is None else scheduler(schedule, optimizer)
    doctor = TrainingDoctor(model, optimizer, warmup_steps=warmup, total_steps=steps)
    for number, batch in enumerate(batches(steps, **data)):
        if rates is not None:
            for group in optimizer.param_groups:
                group["lr"] = rates(number)
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True)
        learning_rate = schedule.get_last_lr()[0]
        optimizer.step()
        stepper.step()
        optimizer.zero_grad()
        doctor.step(loss=loss, learning_rate=learning_rate, grad_norm=norm)
        if evaluate and (number + 1) % evaluate == 0:
            with torch.no_grad():
                doctor.step(eval_loss=sum(model(**batch).loss.item() for batch in batches(4, seed=7)) / 4)
    return doctor


def hooks_of(model):
    """Whatever hangs on the modules of a model."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [(name, kind) for name, module in model.named_modules() for kind in kinds if getattr(module, kind)]


# --- faults: each puts one into a run ---------------------------------------------------------------------------------


def without_residual(case):
    """The stock model as after an edit that lost the skip of its second layer."""
    model = make(case)
    if case == "bert":
        output = model.bert.encoder.layer[1].output
        output.forward = lambda states, skip: output.LayerNorm(output.dropout(output.dense(states)))
        return run(model)
    layer = (model.transformer.h if case == "gpt2" else model.model.layers)[1]
    stock = layer.forward
    layer.forward = lambda states, *args, **kwargs: stock(states, *args, **kwargs) - states
    return run(model)


def detached():
    model = make("llama", "post")
    stock = model.model.layers[2].mlp.forward
    model.model.layers[2].mlp.forward = lambda x: stock(x).detach()
    return run(model)


def with_bias(value):
    """ReLUs that never open."""
    model = make("opt")
    torch.nn.init.constant_(model.model.decoder.layers[0].fc1.bias, value)
    return run(model)


def frozen_zeros():
    model = make("gpt2", "pre")
    torch.nn.init.zeros_(model.transformer.h[1].attn.c_proj.weight)
    torch.nn.init.zeros_(model.transformer.h[1].attn.c_proj.bias)
    model.transformer.h[1].attn.requires_grad_(False)
    return run(model)


def half(case, placement, gain, dtype=torch.float16, **options):
    """A model of half precision whose MLPs write large numbers: the first batch is all it takes."""
    model = convert_checkpoint(tiny_model(case), placement, **options).train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"mlp.(down|c)_proj.weight|\d.output.dense.weight", name):
                weight.mul_(gain)
    return run(model.to(dtype), steps=1, rate=0.0)


def one_group(case, placement):
    model = make(case, placement)
    return run(model, groups=[{"params": model.parameters(), "weight_decay": 0.01}])


def trainer_groups():
    """`Trainer` spares norms and biases by their names, and so not gates."""
    model = make("llama", "gated")
    spared = Trainer(model=model).get_decay_parameter_names(model)
    return run(
        model, groups=[{"params": [p for n, p in model.named_parameters() if n in spared], "weight_decay": 0.1}]
    )


def prepared_scheduler(processes, warmup=10):
    """Accelerate's scheduler, as it steps on so many processes."""

    def prepared(schedule, optimizer):
        optimizer.step_was_skipped = False
        return accelerate.scheduler.AcceleratedScheduler(schedule, optimizer)

    with pytest.MonkeyPatch.context() as patch:
        state = SimpleNamespace(num_processes=processes)
        patch.setattr(accelerate.scheduler, "AcceleratorState", lambda: state)
        patch.setattr(accelerate.scheduler, "GradientState", lambda: SimpleNamespace(sync_gradients=True))
        return run(make("llama"), steps=14, warmup=warmup, scheduler=prepared)


def blow_up(number):
    return 1e-2 if number < 24 else 1.0


def climb(number):
    return 1e-2 * 1.2 ** max(number - 40, 0)


def in_trainer(model, steps=14, data=None, **options):
    """A run of `Trainer`, which logs a loss of 0.0 in place of one that is no number."""
    rows = [{key: value[0] for key, value in batch.items()} for batch in data or batches(80, rows=1)]
    doctor = TrainingDoctor(model)
    options = {"per_device_train_batch_size": 4, "logging_steps": 1, "report_to": "none", "use_cpu": True, **options}
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=steps, save_strategy="no", **options)
        Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[doctor]).train()
    return doctor


def in_trainer_with_nan():
    model = make("llama")
    model.lm_head.weight.register_hook(lambda gradient: gradient * math.nan)
    return in_trainer(model, max_grad_norm=1.0)


DEEP = {"num_hidden_layers": 21}
# fmt: off
FAULTS = [  # rule, what is in its sentence, a run with the fault
    ("oscillates_post", "longer warm-up", lambda: run(make("bert"), 12, 0.3)),
    ("oscillates_post", "longer warm-up", lambda: run(make("gpt2", "post"), 12, 0.3)),
    ("oscillates_post", "longer warm-up", lambda: run(make("llama", ["post", "pre", "pre"]), 12, 1.0)),
    ("oscillates_pre", "lower the learning rate", lambda: run(make("llama"), 12, 0.3)),
    ("oscillates_pre", "lower the learning rate", lambda: run(make("bert", "pre"), 12, 0.3)),
    ("loss_spike", "0.1 to 0.3", lambda: run(make("llama"), 34, clip=math.inf, rates=blow_up)),
    ("loss_spike", "0.1 to 0.3", lambda: run(make("bert"), 30, clip=math.inf, rates=blow_up)),
    ("loss_rises", "lower the learning rate", lambda: run(make("llama"), 90, rates=climb)),
    ("not_finite", "The loss is nan, which clipping", lambda: run(make("gpt2"), 4, rates=lambda _: 1e30)),
    ("not_finite", "The gradient norm is nan", in_trainer_with_nan),
    ("validation_drop", "0.1 to 0.3", lambda: run(make("llama"), 30, clip=math.inf, rates=blow_up, evaluate=10)),
    ("slow_and_deep", "21 Post-Norm layers", lambda: run(make("bert", **DEEP), 121, 1e-4, 10, rows=1)),
    ("does_not_fall", "is still that of a guess (4.", lambda: run(make("llama", num_hidden_layers=1), 300, 0.0)),
    ("warmup_too_long", "takes 5 of 3 steps", lambda: run(make("llama"), 3, warmup=5)),
    ("skip_is_cut", "of layer 1 is", partial(without_residual, "bert")),
    ("skip_is_cut", "of layer 1 is", partial(without_residual, "gpt2")),
    ("skip_is_cut", "of layer 1 is", partial(without_residual, "llama")),
    ("skip_is_cut", "of layer 0 is", lambda: run(make("llama", {"skip_norm": 1.0, "skip_gain": 0.0}))),
    ("skip_is_cut", "of layer 2 is", lambda: run(make("bert", ["post", "post", {"skip_norm": 1.0, "skip_gain": 0.0}]))),
    ("skip_is_cut", "of layer 0 is", lambda: run(make("gpt2", {"skip_norm": 1.0, "skip_gain": 0.0, "dual": 1.0}))),
    ("dead_branches", "layer 0 attn, layer 0 ffn, layer 1", lambda: run(make("bert", {"branch_gain": 0.0}))),
    ("dead_branches", ": layer 2 ffn;", detached),
    ("dead_branches", ": layer 0 ffn;", partial(with_bias, -100.0)),
    ("dead_branches", ": layer 1 attn;", frozen_zeros),
    ("fp16_overflow", "overflows in float16 at layer 0 (inf of 65,504): train", partial(half, "llama", "pre", 1e3)),
    ("fp16_overflow", "approaches the end of float16", partial(half, "gpt2", "pre", 1.5e3)),
    ("fp16_overflow", "`norm_dual_scale=0.05`", partial(half, "bert", "resi_dual", 1e3)),
    ("norms_decay", "such as bert.embeddings.LayerNorm.weight", partial(one_group, "bert", None)),
    ("norms_decay", "such as model.layers.0.attn_skip_gate.weight", trainer_groups),
    ("warmup_too_short", "highest at step 6, but its warm-up should take 10", partial(prepared_scheduler, 2)),
    ("warmup_too_short", "for each process", partial(prepared_scheduler, 4)),
]
ACCOMPANY = {  # the training loss jumps, too; in float16 it is no number
    "validation_drop": {"loss_spike"},
    "loss_rises": {"loss_spike"},
    "fp16_overflow": {"not_finite"},
}
SOUND = {  # the same, but in order
    "the scheduler of one process": partial(prepared_scheduler, 1),
    "ReLUs that open": partial(with_bias, 0.0),
    "bfloat16 holds it": partial(half, "llama", "pre", 1e3, torch.bfloat16),
    "float16 holds it": partial(half, "llama", "pre", 10.0),
    "a dual stream scaled down": partial(half, "bert", "resi_dual", 1e3, norm_dual_scale=0.05),
    "decay of matrices": lambda: run(make("llama", "gated")),
    "a lower learning rate": lambda: run(make("llama"), 30, clip=math.inf, evaluate=10, rates=lambda _: 1e-2),
    "deep, but learning": lambda: run(make("bert", **DEEP), 121, 1e-3, 10, rows=1, same=True),
    "skips that are halved": lambda: run(make("bert", {"skip_norm": 1.0, "skip_gain": 0.5})),
}
# fmt: on


@pytest.mark.parametrize("rule, words, fault", FAULTS, ids=[f"{row[0]}-{n}" for n, row in enumerate(FAULTS)])
def test_a_fault_is_found(rule, words, fault):
    doctor = fault()
    rules = [finding.rule for finding in doctor.findings]
    assert rule in rules and set(rules) <= {rule, *ACCOMPANY.get(rule, ())}, doctor.findings
    found = doctor.findings[rules.index(rule)]
    assert words in found.message
    assert found.to_dict() == {"rule": rule, "step": found.step, "message": found.message, "source": found.source}
    assert found.source in str(found)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * case.startswith("deep")) for case in SOUND]
)
def test_without_the_fault_nothing_is_found(case):
    assert SOUND[case]().findings == []


def test_every_rule_has_a_fault_and_a_source():
    assert {row[0] for row in FAULTS} == {rule.name for rule in RULES}
    for rule in RULES:
        assert SOURCE.search(rule.source) or re.search(
            r"[A-Za-z-]+/[A-Za-z-]+#\d+|(Accelerate|Transformers), |Trainer\.", rule.source
        )
        assert ("try" not in rule.sentence) and rule.sentence.endswith(".") and rule.sentence.count(". ") == 0


# --- runs in order ----------------------------------------------------------------------------------------------------


def healthy(case, placement, steps):
    """A new model, trained with the defaults of the recipes."""
    model = make(case, placement)
    found = training_defaults(placement, 3, "pretraining", total_steps=steps)
    return run(model, steps, found.learning_rate, found.warmup_steps, found.max_grad_norm, evaluate=8)


@pytest.mark.parametrize("number, case", list(enumerate(TINY)))
def test_nothing_is_found_in_healthy_runs(number, case):
    assert healthy(case, PLACEMENTS[number % len(PLACEMENTS)], 24).findings == []


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("case", TINY)
def test_nothing_is_found_in_all_healthy_runs(case, placement):
    assert healthy(case, placement, 30).findings == []


def test_nothing_is_found_with_a_morph_or_adapters():
    from peft import get_peft_model

    from hf_normswap.peft import adapter_config

    start = convert_checkpoint(make("llama"), "post", warm_start="exact")
    NormMorph(start, steps=10)
    adapted = get_peft_model(make("bert", "pre"), adapter_config(make("bert", "pre"), "lora"))
    frozen = [{"params": [p for p in adapted.parameters() if p.ndim > 1 or not p.requires_grad], "weight_decay": 0.1}]
    for model, groups in ((start, None), (adapted, None), (adapted, frozen)):  # nothing decays what has no gradient
        doctor = run(model, 10, groups=groups)
        assert doctor.findings == [] and doctor.graded and not doctor.handles


# --- the edges of the rules about the run -----------------------------------------------------------------------------


def watch(losses, rates=None, evaluations=None, norms=None, **facts):
    """The rules that hold of a run with these numbers."""
    state = Run(**{"kinds": {"pre"}, "depth": 12, **facts})
    found = []
    for number, loss in enumerate(losses):
        state.step += 1
        state.see(loss, rates and rates[number], norms and norms[number], (evaluations or {}).get(number))
        found += [rule.name for rule in RULES if rule.looks_at == "run" and rule.holds(state)]
    return set(found)


NOISE = [0.1 * math.sin(7 * n) for n in range(300)]
FLAT = [2 + n for n in NOISE]
DEEP_RUN = {"kinds": {"post"}, "depth": 21, "guess": 3.0}


@pytest.mark.parametrize(
    "expected, arguments",
    [
        (set(), {"losses": FLAT}),
        ({"loss_spike"}, {"losses": FLAT + [9.0] * 3}),
        ({"loss_spike"}, {"losses": FLAT + [3.5] * 3}),
        (set(), {"losses": FLAT + [9.0] * 2 + [2.0] * 9}),  # hard batches are no spike
        (set(), {"losses": [*FLAT, 9.0, *FLAT[:10], 9.0, *FLAT[:10], 8.0, 8.0, 8.0]}),  # nor what happens now and then
        (set(), {"losses": FLAT + [2.4] * 50}),  # other data
        (set(), {"losses": [1e-3] * 100 + [0.09] * 40}),
        ({"not_finite"}, {"losses": [math.nan] * 50}),
        ({"not_finite"}, {"losses": [math.inf] * 50}),
        ({"not_finite"}, {"losses": [2.0, -math.inf]}),
        ({"not_finite"}, {"losses": [2.0, 1e200]}),  # whose square is none
        ({"not_finite"}, {"losses": [0.0] * 8, "norms": [math.nan] * 8}),
        ({"not_finite"}, {"losses": [0.0] * 8, "norms": [math.nan, *[None] * 6, math.inf]}),  # logged now and then
        (set(), {"losses": [2.0] * 15, "norms": [math.inf] * 7 + [1.0] + [math.inf] * 7}),  # the scaler of float16
        ({"not_finite"}, {"losses": [2.0] * 20, "evaluations": {9: 1.0, 19: math.nan}}),
        ({"oscillates_pre"}, {"losses": [2.0, 3.0, 4.0, 3.5, 5.0] * 3, "guess": 2.0}),
        ({"oscillates_post"}, {"losses": [2.0, 3.0, 4.0, 3.5, 5.0] * 3, "guess": 2.0, "kinds": {"deepnorm", "pre"}}),
        ({"oscillates_pre"}, {"losses": [2 + n / 5 for n in range(15)], "guess": 2.0}),  # or goes up
        (set(), {"losses": [2.0, 3.0] * 20}),  # noise, where nobody knows what a guess costs
        (set(), {"losses": [2.0, 3.0, 4.0, 3.5, 5.0] * 3, "guess": 4.0}),
        (set(), {"losses": [2.0, 3.0, 4.0, 3.5, 5.0] * 3, "guess": 2.0, "headroom": 2.0}),
        (set(), {"losses": [2.0, 2.4, 2.8] * 5, "guess": 2.0}),
        (set(), {"losses": [4 - n / 9 + n % 2 for n in range(15)], "guess": 3.0}),  # jumps, and falls
        (set(), {"losses": [20.0, 30.0, 40.0] * 9, "guess": 2.0}),  # summed over tokens
        ({"loss_rises"}, {"losses": [2 + 6 * n / 300 for n in range(300)], "guess": 10.8}),
        ({"loss_rises"}, {"losses": [0.5 + 5 * n for n in NOISE] + [2 + 5 * n for n in NOISE]}),
        ({"loss_rises"}, {"losses": [3 - n / 100 for n in range(250)] + [0.5 + n / 100 for n in range(100)]}),
        (set(), {"losses": [2 + 6 * n / 300 for n in range(300)], "guess": 10.8, "morphs": True}),
        (set(), {"losses": [2 + n / 650 for n in range(300)]}),
        ({"loss_rises"}, {"losses": [2.5] * 5 + [10.8] * 300, "guess": 10.8}),  # ruined in the first steps
        ({"loss_rises"}, {"losses": [2.5, 2.6, 5.0] + [9.0] * 30 + [7.0] * 600, "guess": 10.8, "kinds": {"post"}}),
        (
            {"loss_rises"},
            {"losses": [1.32, 6.83, 6.99, 5.61, 5.35, 3.99] + [3.9 - n / 200 for n in range(144)], "guess": 4.56},
        ),
        (
            {"oscillates_post"},
            {"losses": [4.6] + [905.0] * 400, "guess": 4.56, "kinds": {"post"}, "depth": 24},
        ),
        ({"loss_rises"}, {"losses": [30.0] + [90.0] * 400, "guess": 10.8}),
        (
            {"oscillates_pre"},
            {"losses": [1.1] + [20.0 + n for n in NOISE] + [20.0] * 99, "guess": 0.69, "headroom": 2.0},
        ),
        ({"oscillates_pre"}, {"losses": [17.0] + [60.0 + n for n in NOISE] + [60.0] * 99, "guess": 10.8}),
        ({"slow_and_deep"}, {"losses": [17.0] * 1000, "guess": 10.8, "kinds": {"post"}, "depth": 24}),
        ({"does_not_fall"}, {"losses": [17.0] * 1000, "guess": 10.8}),
        (set(), {"losses": [30.0] * 400, "guess": 10.8}),  # a sum
        (set(), {"losses": [0.02 + 3 * n / 300 for n in range(300)]}),  # from an exact start
        (set(), {"losses": [0.0, *(4e-4 * min(n, 30) / 30 for n in range(99))]}),  # GRPO
        (set(), {"losses": [-n / 20 for n in range(300)]}),
        (set(), {"losses": [3.0] * 30, "evaluations": {9: 1.0, 19: 1.19, 29: 1.4}}),
        ({"validation_drop"}, {"losses": [3.0] * 30, "evaluations": {9: 1.0, 19: 1.21}}),
        (set(), {"losses": [3 - n / 30 for n in range(30)], "evaluations": {9: 1.0, 19: 1.9}}),  # overfitting
        (set(), {"losses": [0.01] * 30, "evaluations": {9: 1.0, 19: 1.9}}),  # as well
        ({"validation_drop"}, {"losses": [3.4 - n / 60 for n in range(30)], "evaluations": {9: 4.0, 29: 8.0}}),
        (set(), {"losses": [3.4 - n / 60 for n in range(30)], "evaluations": {9: 4.0, 29: 7.0}}),
        ({"validation_drop"}, {"losses": [None] * 30, "evaluations": {9: 1.0, 19: 2.1}}),
        (set(), {"losses": [None] * 30, "evaluations": {9: 0.0, 19: 1e-9, 29: 0.09}}),
        (set(), {"losses": [2.0] * 30, "evaluations": {9: 0.004, 19: 0.006, 29: 0.003}}),
        ({"slow_and_deep"}, {"losses": [3.0] * 120, **DEEP_RUN}),
        (set(), {"losses": [3.0] * 200, **DEEP_RUN, "step": 500}),  # resumed
        (set(), {"losses": [3.0] * 119, **DEEP_RUN}),
        (set(), {"losses": [3.0] * 299, **DEEP_RUN, "depth": 20}),
        (set(), {"losses": [3.0] * 299, **DEEP_RUN, "kinds": {"deepnorm"}}),
        (set(), {"losses": [3.0] * 199, **DEEP_RUN, "warmup_steps": 100}),
        (set(), {"losses": [3.0] * 199, **DEEP_RUN, "rates": [min(n, 120) for n in range(199)]}),
        (set(), {"losses": [2.6] + [2.5] * 199, **DEEP_RUN}),  # it had learned before
        (set(), {"losses": [3.0] * 100 + [2.8] * 100, **DEEP_RUN}),
        ({"does_not_fall"}, {"losses": [3.0] * 300, "guess": 3.0}),
        ({"does_not_fall"}, {"losses": [3.0] * 300, **DEEP_RUN, "depth": 20}),
        (set(), {"losses": [3.0] * 299, "guess": 3.0}),
        (set(), {"losses": [3.0] * 999}),  # of a regression
        ({"warmup_too_long"}, {"losses": [3.0], "warmup_steps": 8, "total_steps": 8}),
        (set(), {"losses": [3.0], "warmup_steps": 8, "total_steps": 9}),
        (set(), {"losses": [3.0], "warmup_steps": 0, "total_steps": -1}),
        (set(), {"losses": [3.0] * 9, "rates": [*range(5), 4, 3, 2, 1]}),  # nobody said how long it should take
        (set(), {"losses": [3.0] * 9, "rates": [*range(5), 4, 3, 2, 1], "warmup_steps": 4}),
        ({"warmup_too_short"}, {"losses": [3.0] * 9, "rates": [*range(5), 4, 3, 2, 1], "warmup_steps": 8}),
        (set(), {"losses": [3.0] * 4, "rates": [4, 3, 2, 1], "warmup_steps": 8, "step": 6}),  # resumed behind the top
        (set(), {"losses": [3.0] * 4, "rates": [3, 4, 3, 2], "warmup_steps": 8, "step": 7}),
        (set(), {"losses": [3.0] * 9, "rates": [1.0] * 9, "warmup_steps": 8}),  # a schedule that has none
    ],
)
def test_edges_of_the_run(expected, arguments):
    assert watch(**arguments) == expected


@pytest.mark.parametrize(
    "peak, verb", [(16_375, None), (16_377, "approaches"), (65_504, "approaches"), (math.inf, "overfl")]
)
def test_edges_of_float16(peak, verb):
    found = Model(peak=peak).overflow()
    assert (found is None) if verb is None else found["verb"].startswith(verb)


# fmt: off
STEPS = numpy.arange(400)
STREAMS = {  # losses of runs in order, of which too many were taken for ill by rules that look at one draw
    "documents": lambda random: random.normal(2.5, 0.4, 400),
    "documents and code": lambda random: numpy.where(random.random(400) < 0.1, 1.0, random.normal(2.5, 0.4, 400)),
    "heavy tails": lambda random: random.lognormal(0, 1.0, 400),
    "other data": lambda random: random.normal(numpy.where(STEPS < 200, 2.0, 2.4), 0.03),
    "wrong labels": lambda random: (  # 3 %, in batches of eight, of a classifier that gets surer
        0.68 * numpy.exp(-STEPS / 60) + (random.random((400, 8)) < 0.03).mean(1) * numpy.minimum(0.7 + STEPS / 60, 6)
    ),
    "a new head": lambda random: numpy.log1p(numpy.exp(  # batches of four, two classes
        -random.normal(0, 1.5, (400, 4)) * numpy.exp(-STEPS / 90)[:, None]
        - random.normal(1.5, 1.5, (400, 4)) * (1 - numpy.exp(-STEPS / 90)[:, None])
    )).mean(1),
    "continued": lambda random: random.normal(1.8 - 0.03 * STEPS / 400, 0.1),
    "harder data": lambda random: random.normal(3.0 * (1 + 0.2 * STEPS / 400), 0.3),
    "documents of eight steps": lambda random: random.normal(numpy.repeat(random.normal(2.5, 0.25, 50), 8), 0.3),
    "preferences": lambda random: numpy.log1p(numpy.exp(-random.normal(3, 3, 400) * (1 - numpy.exp(-STEPS / 60)))),
    "a divergence that grows": lambda random: abs(random.normal(numpy.minimum(STEPS / 100, 1.5), 0.02)),
}
ILL = {  # losses of runs that go wrong, whose noise must not hide it: what a guess costs, and the losses
    "ruined at once": (4.56, lambda random: [1.32, *random.normal(3.2 + 3.8 * numpy.exp(-STEPS / 8), 0.3)]),
    "ruined, and recovering": (10.8, lambda random: [1.55, *random.normal(2.3 + 2.5 * numpy.exp(-STEPS / 100), 0.2)]),
    "ruined after five": (10.8, lambda random: random.normal(numpy.where(STEPS < 5, 2.5, 10.8), 0.2)),
    "lost again": (10.8, lambda random: random.normal(numpy.interp(STEPS, [0, 200, 300], [10.8, 7.0, 10.8]), 0.1)),
    "slowly": (10.8, lambda random: random.normal(numpy.interp(STEPS, [50, 250], [3.0, 6.0]), 0.3)),
    "slowly by 1.2": (10.8, lambda random: random.normal(numpy.interp(STEPS, [100, 200], [3.0, 4.2]), 0.2)),
}
# fmt: on


@pytest.mark.parametrize("stream", STREAMS)
def test_noise_is_no_fault(stream):
    guess = math.log(2) if stream in ("wrong labels", "a new head") else 10.3
    runs = (STREAMS[stream](numpy.random.default_rng(seed)).tolist() for seed in range(20))
    facts = {
        "kinds": {"post"},
        "depth": 24,
        "guess": guess,
        "headroom": 2.0 if guess < 1 else 1.25,
        "warmup_steps": 20,
    }
    assert [found for losses in runs if (found := watch(losses, **facts))] == []


@pytest.mark.parametrize("stream", ILL)
def test_noise_does_not_hide_a_fault(stream):
    guess, losses = ILL[stream]
    for seed in range(8):
        found = watch(losses(numpy.random.default_rng(seed)), guess=guess)
        assert "loss_rises" in found and "does_not_fall" not in found


@pytest.mark.parametrize("seed", range(8))
def test_a_plateau_does_not_hide_a_drop(seed):
    losses = numpy.random.default_rng(seed).normal(3, 0.05, 60)
    assert watch(losses, evaluations={19: 5.0, 39: 4.0, 59: 8.0}) == {"validation_drop"}


def test_memory_does_not_grow():
    state = Run(kinds={"post"}, depth=12)
    before = None
    for number in range(300):
        state.see(1.0 + number % 3, 1.0, 1.0, 1.0)
        after = {
            key: len(value) if isinstance(value, (tuple, list, deque)) else 1 for key, value in vars(state).items()
        }
        assert number < 32 or before == after
        before = after


# --- it only watches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case, placement", [("bert", "resi_dual"), ("gpt2", "pre"), ("qwen2_moe", "post")])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_is_the_same_bit_for_bit(case, placement, checkpointing):
    ends = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = make(case, placement)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        modes, hooks = [module.training for module in model.modules()], hooks_of(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        doctor = TrainingDoctor(model, optimizer) if watched else None
        for batch in batches(4):  # with dropout
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if doctor:
                doctor.step(loss=loss)
        assert [module.training for module in model.modules()] == modes
        assert hooks_of(model) == hooks and not optimizer._optimizer_step_pre_hooks
        ends.append([parameter.detach().clone() for parameter in model.parameters()] + [torch.get_rng_state()])
        assert not doctor or (doctor.findings == [] and doctor.graded)
    assert all(torch.equal(one, other) for one, other in zip(*ends))


def with_own_cache(model, **inputs):
    return model(**inputs, use_cache=True, past_key_values=DynamicCache(config=model.config)).logits


def without_gradients(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def in_place(model, **inputs):
    """A layer that writes to what it is given."""
    layers = attrgetter(get_architecture(model.config).layers)(model.base_model)
    layer, embeds = layers[0], model.get_input_embeddings()(inputs["input_ids"]).detach()
    stock = layer.forward
    layer.forward = lambda states, *args, **kwargs: stock(states.add_(1), *args, **kwargs)
    return torch.cat([model(inputs_embeds=embeds).logits, embeds], -1)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "looks, act",
    [
        (False, lambda model, **inputs: model.eval().generate(**inputs, max_new_tokens=6, do_sample=False)),
        (False, lambda model, **inputs: model.eval()(**inputs).logits),
        (False, with_own_cache),
        (False, without_gradients),
        (True, in_place),
        (True, lambda model, **inputs: model(**inputs).logits),
    ],
    ids=["generate", "eval", "cache", "no_grad", "in_place", "training"],
)
def test_what_comes_out_is_the_same(case, looks, act):
    results = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = make(case)
        doctor = TrainingDoctor(model) if watched else None
        results.append(act(model, input_ids=next(batches(1))["input_ids"]))
    assert torch.equal(*results) and (not doctor.handles) == looks
    model.train()(**next(batches(1)))
    assert not doctor.handles and not hooks_of(model)  # it looks as soon as the model trains


def test_the_first_batch_has_no_labels():
    model = make("llama")
    optimizer = torch.optim.AdamW(parameter_groups(model, model, 1e-3, 0.0))
    doctor = TrainingDoctor(model, optimizer)
    for number, batch in enumerate(batches(2)):
        labels = batch["labels"] if number else torch.full_like(batch["labels"], -100)
        loss = model(batch["input_ids"], labels=labels, num_items_in_batch=torch.tensor(32)).loss
        loss.backward()
        optimizer.step()
        assert doctor.step(loss=loss) == [] and doctor.graded == bool(number) == (not doctor.handles)


@pytest.mark.parametrize(
    "odd", ["n/a", {"a": 1.0}, [1e-3, 1e-4], torch.ones(3), 1j, object(), torch.ones(1, device="meta")]
)
def test_what_is_no_number_is_left_out(odd):
    doctor = TrainingDoctor(make("llama"))
    assert doctor.step(loss=odd, learning_rate=odd, grad_norm=odd, eval_loss=odd) == []
    doctor.on_log(None, None, None, logs={"loss": odd, "grad_norm": odd, "eval_loss": odd})
    assert doctor.run == dataclasses.replace(doctor.run, seen=0, step=1, broken=None, top=-math.inf)
    doctor.step(loss=numpy.float32(2.0))
    assert doctor.run.seen == 1


def test_a_bad_first_batch_is_the_runs_own_affair():
    model = make("llama", "post")
    doctor = TrainingDoctor(model)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[VOCABULARY + 5]]))
    assert model.training and not hooks_of(model) and doctor.findings == []
    model(**next(batches(1)))


def test_what_is_not_looked_at():
    compiled = make("llama", "post")
    compiled.compile(backend="eager")
    for model in (compiled, torch.compile(make("llama", "post"), backend="eager")):
        doctor = TrainingDoctor(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
        assert not hooks_of(model) and not doctor.handles
        assert [finding.rule for finding in doctor.findings] == ["norms_decay"]
        assert [finding.rule for finding in doctor.step(loss=2.0)] == ["norms_decay"]
        assert [finding.rule for finding in doctor.step(loss=math.nan)] == ["not_finite"]
        assert doctor.step(loss=math.nan) == []
        assert "2 findings" in repr(doctor) and all(finding.message in str(doctor) for finding in doctor.findings)
    for other in ("x", torch.nn.Linear(2, 2), None):
        with pytest.raises(NormSwapError, match="expected a Transformers model"):
            TrainingDoctor(other)
    with pytest.raises(NormSwapError, match="has no row here"):
        TrainingDoctor(AutoModel.from_config(T5Config(vocab_size=9, d_model=8, d_ff=8, num_layers=1, num_heads=1)))


# --- where it is used -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate, expected", [(1e-4, set()), (0.3, {"oscillates_post"})])
def test_as_a_callback_of_trainer(rate, expected):
    doctor = in_trainer(
        make("bert", "post"), learning_rate=rate, weight_decay=0.1, warmup_steps=4 if rate < 0.1 else 0,
        eval_strategy="steps", eval_steps=7,
    )  # fmt: skip
    assert {finding.rule for finding in doctor.findings} == expected
    assert doctor.run.step == 14 and doctor.graded and not hooks_of(doctor.model)
    assert not any(math.isnan(loss) for loss in doctor.run.evaluations)


@pytest.mark.parametrize("rate, expected", [(None, []), (0.3, ["oscillates_post"])])
def test_in_the_recipes(tmp_path, rate, expected):
    rows = [{key: value[0] for key, value in batch.items()} for batch in batches(60, rows=1)]
    args = RunArguments(str(tmp_path), per_device_train_batch_size=4, learning_rate=rate, max_train_steps=14)
    args = dataclasses.replace(args, warmup_steps=None if rate is None else 0)
    accelerator = make_accelerator(args)
    train(accelerator, make("bert", "post"), DataLoader(rows, batch_size=4, shuffle=True), args, task="pretraining")
    described = json.loads((tmp_path / "run.json").read_text())
    assert [finding["rule"] for finding in described["findings"]] == expected
    assert all(finding["source"] for finding in described["findings"])
