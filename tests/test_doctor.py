"""The doctor: each rule speaks up about the fault it is for, put into a real run, and none about runs that are in order."""

import dataclasses
import json
import math
import re
from functools import partial
from types import SimpleNamespace

import accelerate.scheduler
import pytest
import torch
from test_advice import SOURCE
from tiny_models import TINY, VOCABULARY, tiny_model
from torch.utils.data import DataLoader
from transformers import AutoModel, T5Config, Trainer, TrainingArguments, get_scheduler

from hf_normswap import (
    NormMorph,
    NormSwapError,
    TrainingDoctor,
    convert_checkpoint,
    parameter_groups,
    training_defaults,
)
from hf_normswap.doctor import RULES, Model, Run
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
    optimizer = torch.optim.AdamW(groups or parameter_groups(model, model, rate, 0.01), lr=rate)
    schedule = get_scheduler("constant_with_warmup", optimizer, warmup)
    stepper = schedule if scheduler is None else scheduler(schedule, optimizer)
    doctor = TrainingDoctor(model, optimizer, warmup_steps=warmup, total_steps=steps)
    for number, batch in enumerate(batches(steps, **data)):
        if rates is not None:
            for group in optimizer.param_groups:
                group["lr"] = rates(number)
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
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


DEEP = {"num_hidden_layers": 21}
# fmt: off
FAULTS = [  # rule, what is in its sentence, a run with the fault
    ("oscillates_post", "longer warm-up", lambda: run(make("bert"), 12, 0.3)),
    ("oscillates_post", "longer warm-up", lambda: run(make("gpt2", "post"), 12, 0.3)),
    ("oscillates_post", "longer warm-up", lambda: run(make("llama", ["post", "pre", "pre"]), 12, 0.3)),
    ("oscillates_pre", "lower the learning rate", lambda: run(make("llama"), 12, 0.3)),
    ("oscillates_pre", "lower the learning rate", lambda: run(make("bert", "pre"), 12, 0.3)),
    ("loss_spike", "0.1 to 0.3", lambda: run(make("llama"), 30, clip=math.inf, rates=blow_up)),
    ("loss_spike", "0.1 to 0.3", lambda: run(make("bert"), 30, clip=math.inf, rates=blow_up)),
    ("validation_drop", "0.1 to 0.3", lambda: run(make("llama"), 30, clip=math.inf, rates=blow_up, evaluate=10)),
    ("slow_and_deep", "21 Post-Norm layers", lambda: run(make("bert", **DEEP), 101, 1e-4, 10, rows=1)),
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
ACCOMPANY = {"validation_drop": {"loss_spike"}}  # the training loss jumps, too
SOUND = {  # the same, but in order
    "the scheduler of one process": partial(prepared_scheduler, 1),
    "ReLUs that open": partial(with_bias, 0.0),
    "bfloat16 holds it": partial(half, "llama", "pre", 1e3, torch.bfloat16),
    "float16 holds it": partial(half, "llama", "pre", 10.0),
    "a dual stream scaled down": partial(half, "bert", "resi_dual", 1e3, norm_dual_scale=0.05),
    "decay of matrices": lambda: run(make("llama", "gated")),
    "a lower learning rate": lambda: run(make("llama"), 30, clip=math.inf, evaluate=10, rates=lambda _: 1e-2),
    "deep, but learning": lambda: run(make("bert", **DEEP), 101, 1e-3, 10, rows=1, same=True),
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


@pytest.mark.parametrize("case", SOUND)
def test_without_the_fault_nothing_is_found(case):
    assert SOUND[case]().findings == []


def test_every_rule_has_a_fault_and_a_source():
    assert {row[0] for row in FAULTS} == {rule.name for rule in RULES}
    for rule in RULES:
        assert SOURCE.search(rule.source) or re.search(
            r"[A-Za-z-]+/[A-Za-z-]+#\d+|Accelerate, |Trainer\.", rule.source
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
    for model in (start, get_peft_model(make("bert", "pre"), adapter_config(make("bert", "pre"), "lora"))):
        doctor = run(model, 10)
        assert doctor.findings == [] and doctor.graded and not doctor.handles


# --- the edges of the rules about the run -----------------------------------------------------------------------------


def watch(losses, rates=None, evaluations=None, **facts):
    """The rules that hold of a run with these numbers."""
    state = Run(**{"kinds": {"pre"}, "depth": 12, **facts})
    found = []
    for number, loss in enumerate(losses):
        state.step += 1
        state.see(loss, rates and rates[number], None, (evaluations or {}).get(number))
        found += [rule.name for rule in RULES if rule.looks_at == "run" and rule.holds(state)]
    return set(found)


NOISE = [math.sin(7 * n) for n in range(200)]


@pytest.mark.parametrize(
    "expected, arguments",
    [
        (set(), {"losses": [2 + 0.1 * n for n in NOISE]}),
        ({"loss_spike"}, {"losses": [2 + 0.1 * n for n in NOISE] + [9.0, 9.0]}),
        (set(), {"losses": [2 + 0.1 * n for n in NOISE] + [9.0] + [2.0] * 9}),  # a hard batch is no spike
        (set(), {"losses": [1e-3] * 100 + [1.05e-3] * 9}),
        ({"loss_spike"}, {"losses": [2.0, math.nan]}),
        ({"loss_spike"}, {"losses": [2 + 0.1 * n for n in NOISE] + [math.inf]}),
        ({"oscillates_pre"}, {"losses": [2.0, 3.0] * 10}),
        (set(), {"losses": [2.0, 2.1] * 10}),
        (set(), {"losses": [4 - n / 5 + n % 2 for n in range(15)]}),  # jumps, and falls
        (set(), {"losses": [4 - n / 60 for n in range(60)] + [2.0, 3.0, 2.5, 3.5] * 10}),  # late
        (set(), {"losses": [3.0] * 30, "evaluations": {9: 1.0, 19: 1.19, 29: 1.4}}),
        ({"validation_drop"}, {"losses": [3.0] * 30, "evaluations": {9: 1.0, 19: 1.21}}),
        (set(), {"losses": [3 - n / 30 for n in range(30)], "evaluations": {9: 1.0, 19: 1.9}}),  # overfitting
        ({"validation_drop"}, {"losses": [None] * 30, "evaluations": {9: 1.0, 19: 2.1}}),
        ({"validation_drop"}, {"losses": [None] * 30, "evaluations": {9: 1.0, 19: math.nan}}),
        (set(), {"losses": [None] * 30, "evaluations": {9: 0.0, 19: 0.0}}),
        ({"slow_and_deep"}, {"losses": [3.0] * 100, "kinds": {"post"}, "depth": 21}),
        (set(), {"losses": [3.0] * 200, "kinds": {"post"}, "depth": 21, "step": 500}),  # resumed
        (set(), {"losses": [3.0] * 99, "kinds": {"post"}, "depth": 21}),
        (set(), {"losses": [3.0] * 100, "kinds": {"post"}, "depth": 20}),
        (set(), {"losses": [3.0] * 100, "kinds": {"deepnorm"}, "depth": 100}),
        (set(), {"losses": [3.0] * 150, "kinds": {"post"}, "depth": 21, "warmup_steps": 100}),
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


def test_memory_does_not_grow():
    state = Run(kinds={"post"}, depth=12)
    before = None
    for number in range(300):
        state.see(1.0 + number % 3, 1.0, 1.0, 1.0)
        after = {key: len(value) if isinstance(value, tuple) else 1 for key, value in vars(state).items()}
        assert before in (None, after)
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
        assert [finding.rule for finding in doctor.step(loss=math.nan)] == ["loss_spike"]
        assert doctor.step(loss=math.nan) == []
    with pytest.raises(NormSwapError, match="has no row here"):
        TrainingDoctor(AutoModel.from_config(T5Config(vocab_size=9, d_model=8, d_ff=8, num_layers=1, num_heads=1)))


# --- where it is used -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate, expected", [(1e-4, set()), (0.3, {"oscillates_post"})])
def test_as_a_callback_of_trainer(tmp_path, rate, expected):
    model = make("bert", "post")
    rows = [{key: value[0] for key, value in batch.items()} for batch in batches(80, rows=1)]
    doctor = TrainingDoctor(model)
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=14, learning_rate=rate, logging_steps=1, report_to="none",
        weight_decay=0.1, warmup_steps=4 if rate < 0.1 else 0, eval_strategy="steps", eval_steps=7, use_cpu=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[doctor]).train()
    assert {finding.rule for finding in doctor.findings} == expected
    assert doctor.run.step == 14 and doctor.graded and not hooks_of(model)
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
