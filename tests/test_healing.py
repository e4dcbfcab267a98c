"""Calibrated starts and healing bring a conversion near its source, leave the source alone, and fail without a trace."""

import copy

import pytest
import torch
import transformers
from accelerate import Accelerator, dispatch_model
from datasets import Dataset
from tiny_models import TARGETS, TINY, tiny_batch, tiny_model
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_normswap import NormMorph, NormSwapError, convert_checkpoint, heal, parameter_groups, token_batches
from hf_normswap.calibration import DEFAULT_TEXT
from hf_normswap.healing import distillation_loss
from recipes.assets import gutenberg, minilm, movie_reviews, smollm2


def logits(model):
    with torch.no_grad():
        return model(**tiny_batch()).logits


def tokens(rows=24, length=16):
    return torch.randint(4, 96, (rows, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", TINY)
def test_calibrated_starts_are_plain_and_leave_the_source_alone(case, target):
    model = tiny_model(case)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plain = convert_checkpoint(model, TARGETS[target])
    converted = convert_checkpoint(model, TARGETS[target], warm_start="calibrated", calibration=tokens())
    configs = [{**one.config.to_dict(), "norm_conversion": None} for one in (converted, plain)]
    assert configs[0] == configs[1]
    shapes = [{key: value.shape for key, value in one.state_dict().items()} for one in (plain, converted)]
    assert shapes[0] == shapes[1]
    assert logits(converted).isfinite().all()
    same = all(torch.equal(value, plain.state_dict()[key]) for key, value in converted.state_dict().items())
    assert same == torch.equal(logits(plain), logits(model))  # what computes something else was fitted
    pointers = [{name: one.data_ptr() for name, one in part.named_parameters()} for part in (plain, converted)]
    assert not same or all(
        pointers[0][name] == pointers[1][name] for name, _ in model.named_parameters() if name in pointers[1]
    )
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert converted.get_input_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert not model.training and not any("forward" in vars(module) for module in model.modules())


# cosine of mean embeddings to the source's: what a hand edit leaves, and the least that calibration has to reach
COSINES = {"pre": (0.6, 0.93), "deepnorm": (0.99, 0.9999), "resi_dual": (0.99, 0.9999)}


def embeddings(model, tokenizer, texts):
    batch = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return (states * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize("placement", COSINES)
def test_minilm_keeps_its_embeddings(placement):
    folder = minilm()
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = [row["text"] for row in movie_reviews() if len(row["text"].split()) >= 5]
    wanted = embeddings(model, tokenizer, texts[::50][:200])
    cosines = []
    for options in (
        {},
        {"warm_start": "calibrated", "calibration": texts[13::50], "tokenizer": tokenizer},
    ):
        found = embeddings(convert_checkpoint(model, placement, **options), tokenizer, texts[::50][:200])
        cosines.append(torch.nn.functional.cosine_similarity(wanted, found).mean().item())
    hand_edit, least = COSINES[placement]
    assert cosines[0] < hand_edit and cosines[1] >= least, cosines


EXACT = [placement for placement in TARGETS.values() if not isinstance(placement, list)]


def test_exact_starts_of_minilm(tmp_path):
    folder = minilm()
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer([row["text"] for row in movie_reviews()[:16]], padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted = model(**batch).last_hidden_state[batch["attention_mask"].bool()]
        for placement in EXACT:
            converted = convert_checkpoint(model, placement, warm_start="exact")
            found = converted(**batch).last_hidden_state[batch["attention_mask"].bool()]
            assert (found - wanted).abs().max() <= 1e-4, placement


@pytest.mark.slow
def test_exact_starts_of_smollm2(tmp_path):
    folder = smollm2()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(gutenberg("austen-emma")[2000:2600], return_tensors="pt")
    with torch.no_grad():
        wanted = model(**batch).logits
        for placement in EXACT:
            converted = convert_checkpoint(model, placement, warm_start="exact")
            assert (converted(**batch).logits - wanted).abs().max() <= 1e-4, placement
            converted.save_pretrained(tmp_path)
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
            assert (loaded(**batch).logits - wanted).abs().max() <= 1e-4, placement
            low = [one(**batch).logits.float() for one in (loaded.to(torch.bfloat16), copy.deepcopy(model).bfloat16())]
            assert (low[0] - low[1]).norm() <= 0.02 * low[1].norm(), placement


@pytest.mark.slow
def test_smollm2_keeps_its_loss():
    folder = smollm2()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    def windows(book, count):
        ids = tokenizer(gutenberg(book)[2000 : 2000 + count * 4000], return_tensors="pt").input_ids[0]
        return ids[: count * 512].view(count, 512)

    def loss(model):
        with torch.no_grad():
            losses = [model(input_ids=ids, labels=ids).loss.item() for ids in windows("austen-emma", 8).split(2)]
        return sum(losses) / len(losses)

    calibration = torch.cat([windows("austen-sense", 4), windows("carroll-alice", 4)])
    expected = loss(model)
    for placement in ("post", "deepnorm"):
        converted = convert_checkpoint(model, placement, warm_start="calibrated", calibration=calibration)
        assert loss(converted) <= expected + 0.5


@pytest.mark.parametrize("head", ["AutoModelForCausalLM", "AutoModel"])
def test_data_in_every_form_is_the_same_data(head):
    model = getattr(transformers, head).from_config(tiny_model("gpt2" if "Causal" in head else "bert").config)
    rows = tokens(6, 16)
    forms = [
        rows,
        rows.tolist(),
        Dataset.from_dict({"input_ids": rows.tolist()}),
        [{"input_ids": rows}],
        iter([{"input_ids": rows, "attention_mask": torch.ones_like(rows)}]),
    ]
    for form in forms:
        batches = list(token_batches(form, model, length=16))
        assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]), rows)
    for flat in (rows.flatten(), rows.flatten().numpy(), rows.flatten().tolist()):
        (batch,) = token_batches(flat, model, length=16, max_tokens=64, batch_size=4)
        assert torch.equal(batch["input_ids"], rows[:4])
    padded = {"input_ids": rows.tolist(), "attention_mask": [[0] * 4 + [1] * 12] * 6, "text": ["a"] * 6}
    rows_of = [dict(zip(padded, row)) for row in zip(*padded.values())]
    for form in (
        Dataset.from_dict(padded),
        rows_of,
        padded,
        Dataset.from_dict(padded).to_iterable_dataset().map(dict),
    ):
        (batch,) = token_batches(form, model, length=12)
        assert torch.equal(batch["input_ids"], rows[:, 4:]) and batch["attention_mask"].all()
    with pytest.raises(NormSwapError, match="tokenizer"):
        list(token_batches("a text", model))
    folder = minilm()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for form in (None, DEFAULT_TEXT, [DEFAULT_TEXT, "More."], Dataset.from_dict({"text": [DEFAULT_TEXT]})):
        batches = list(token_batches(form, model, tokenizer))
        assert batches[0]["input_ids"].shape == batches[0]["attention_mask"].shape
        assert batches[0]["input_ids"].shape[-1] <= model.config.max_position_embeddings
    for form in ([], "", iter(()), torch.zeros(0, 4).long(), Dataset.from_dict({"text": []})):
        with pytest.raises(NormSwapError, match="empty"):
            list(token_batches(form, model, tokenizer))
    for form, words in (
        (Dataset.from_dict({"words": ["a"]}), "words"),
        ({"train": Dataset.from_dict({"text": ["a"]})}, "train"),
        ([None], "NoneType"),
        ([[torch.zeros(2, 3)]], "cannot read list"),
        (Dataset.from_dict({"text": ["a", None]}), "NoneType"),
    ):
        with pytest.raises(NormSwapError, match=words):
            list(token_batches(form, model, tokenizer))


def test_a_failed_calibration_names_the_branch_and_leaves_no_trace(monkeypatch):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(NormSwapError, match="layer 1, ffn"):
        convert_checkpoint(model, "post", warm_start="calibrated", calibration=tokens())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(NormSwapError, match="empty"):
        convert_checkpoint(model, "post", warm_start="calibrated", calibration=[])
    with pytest.raises(NormSwapError, match="are for"):
        convert_checkpoint(model, "post", calibration=tokens())

    def exhausted(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("hf_normswap.warm_start.regress", exhausted)
    with pytest.raises(NormSwapError, match="out of memory on 384 tokens: pass fewer"):
        convert_checkpoint(tiny_model("llama"), "post", warm_start="calibrated", calibration=tokens())


def test_calibration_of_a_dispatched_model():
    model = tiny_model("llama")
    plain = convert_checkpoint(model, "post", warm_start="calibrated", calibration=tokens())
    hooked = dispatch_model(tiny_model("llama"), {"": "cpu"}, main_device="cpu", force_hooks=True)
    converted = convert_checkpoint(hooked, "post", warm_start="calibrated", calibration=tokens())
    assert torch.equal(logits(converted), logits(plain))
    assert all("_hf_hook" in vars(layer) for layer in (*hooked.model.layers, *converted.model.layers))
    assert torch.equal(logits(hooked), logits(model))


def test_learning_rates_follow_the_folds():
    model = tiny_model("llama")
    converted = convert_checkpoint(model, "post", warm_start="calibrated", calibration=tokens())
    rates = {id(one): group["lr"] for group in parameter_groups(model, converted, 1.0) for one in group["params"]}
    name = "model.layers.2.mlp.down_proj.weight"
    ratio = converted.get_parameter(name).norm() / model.get_parameter(name).norm()
    assert rates[id(converted.get_parameter(name))] == pytest.approx(ratio.item(), rel=1e-4) and ratio < 0.9
    assert rates[id(converted.model.norm.weight)] == 1


CASES = {"bert": "pre", "gpt2": "post", "llama": "sandwich", "olmo2": "pre"}


def healed(case, folder=None, steps=12, **options):
    model = tiny_model(case)
    warm_start = "exact" if options.pop("morph") else "none"
    converted = convert_checkpoint(model, CASES[case], warm_start=warm_start)
    morph = NormMorph(converted, steps=8) if warm_start == "exact" else None
    data = [{"input_ids": ids} for ids in tokens(40).split(4)]
    kept = copy.deepcopy(model.state_dict())
    losses = heal(model, converted, data, steps, learning_rate=1e-3, morph=morph, output_dir=folder, **options)
    assert all(torch.equal(kept[key], value) for key, value in model.state_dict().items())
    return converted, losses


@pytest.mark.parametrize("morph", [False, True], ids=["jump", "morph"])
@pytest.mark.parametrize("case", CASES)
def test_healing_heals_and_resumes_bit_for_bit(case, morph, tmp_path, monkeypatch):
    whole, losses = healed(case, morph=morph)
    if not morph:
        assert sum(losses[-3:]) < sum(losses[:3])
    assert whole.config.norm_target is None and whole.config.norm_placement == CASES[case]
    for stop in (1, 9):
        folder, left = tmp_path / str(stop), iter(range(stop))

        def interrupted(*args, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return distillation_loss(*args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("hf_normswap.healing.distillation_loss", interrupted)
            healed(case, folder, morph=morph, save_steps=stop)
        assert [path.name for path in folder.iterdir()] == ["checkpoint"]
        resumed, again = healed(case, folder, morph=morph, resume_from_checkpoint=True)
        assert again == losses
        pairs = zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_healing_with_lora_trains_little_and_merges():
    from peft import LoraConfig

    model = tiny_model("llama")
    converted = convert_checkpoint(model, "post", warm_start="calibrated", calibration=tokens())
    before = {name: parameter.clone() for name, parameter in converted.named_parameters()}
    losses = heal(model, converted, tokens(), 8, learning_rate=1e-3, lora=LoraConfig(target_modules=["q_proj"], r=2))
    after = dict(converted.named_parameters())
    assert list(after) == list(before) and losses[-1] < losses[0]
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "input_layernorm", "post_attention_layernorm", "norm"}
    assert all(parameter.requires_grad for parameter in after.values())


def test_an_interrupted_healing_leaves_no_trace(monkeypatch):
    from peft import LoraConfig

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_normswap.healing.distillation_loss", interrupt)
    source = convert_checkpoint(tiny_model("llama"), "res_post")
    converted = convert_checkpoint(source, "pre")
    for model in (source, converted):
        model.train()
        model.lm_head.eval()
    next(converted.parameters()).requires_grad_(False)
    before = [{name: module.training for name, module in model.named_modules()} for model in (source, converted)]
    frozen = {name: parameter.requires_grad for name, parameter in converted.named_parameters()}
    accelerator = Accelerator()
    with pytest.raises(KeyboardInterrupt):
        heal(source, converted, tokens(), 2, lora=LoraConfig(target_modules=["q_proj"]), accelerator=accelerator)
    after = [{name: module.training for name, module in model.named_modules()} for model in (source, converted)]
    assert before == after and frozen == {name: one.requires_grad for name, one in converted.named_parameters()}
    assert accelerator._models == accelerator._optimizers == accelerator._custom_objects == []
    storages = [{tensor.data_ptr() for tensor in (*one.parameters(), *one.buffers())} for one in (source, converted)]
    assert not storages[0] & storages[1]


def test_calibration_reads_whole_sequences_whatever_the_head():
    data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens().split(4)]
    data[0]["attention_mask"][:, :5] = 0
    fits = []
    for auto in ("AutoModelForCausalLM", "AutoModel", "AutoModelForSequenceClassification"):
        model = tiny_model("llama", auto)
        model.base_model.load_state_dict(tiny_model("llama").base_model.state_dict())
        converted = convert_checkpoint(model, "post", warm_start="calibrated", calibration=data)
        fits.append(converted.base_model.layers[2].mlp.down_proj.weight)
    assert torch.equal(fits[0], fits[1]) and torch.equal(fits[0], fits[2])


def test_calibration_needs_what_cross_attention_reads():
    model = tiny_model("bert", "AutoModelForCausalLM", is_decoder=True, add_cross_attention=True)
    states = torch.randn(24, 5, 32, generator=torch.Generator().manual_seed(1))
    with pytest.raises(NormSwapError, match="encoder_hidden_states"):
        convert_checkpoint(model, "pre", warm_start="calibrated", calibration=tokens())
    data = [{"input_ids": tokens(), "encoder_hidden_states": states}]

    def distance(converted):
        with torch.no_grad():
            wanted, found = (one(**data[0]).logits for one in (model, converted))
        return ((wanted - found).norm() / wanted.norm()).item()

    calibrated = convert_checkpoint(model, "pre", warm_start="calibrated", calibration=data)
    assert distance(calibrated) < 0.8 * distance(convert_checkpoint(model, "pre"))


def test_calibration_brings_converted_models_back():
    for case, first, second in (
        ("bert", "resi_dual", "pre"),
        ("llama", "post", "pre"),
        ("llama", "resi_dual", "post"),
    ):
        source = convert_checkpoint(tiny_model(case), first)
        distances = []
        for options in ({}, {"warm_start": "calibrated", "calibration": tokens()}):
            wanted, found = logits(source), logits(convert_checkpoint(source, second, **options))
            distances.append(((wanted - found).norm() / wanted.norm()).item())
        assert distances[1] < distances[0], (case, first, second)


def test_healing_refuses():
    model = tiny_model("llama")
    converted = convert_checkpoint(model, "post")
    with pytest.raises(NormSwapError, match="not a converted"):
        heal(model, model, tokens(), 1)
    with pytest.raises(NormSwapError, match="output_dir"):
        heal(model, converted, tokens(), 1, save_steps=1)
    with pytest.raises(NormSwapError, match="another model"):
        heal(model, converted, tokens(), 1, morph=NormMorph(convert_checkpoint(model, "post"), steps=1))
    encoder = convert_checkpoint(tiny_model("bert"), "pre")
    with pytest.raises(NormSwapError, match="label_weight"):
        heal(tiny_model("bert"), encoder, tokens(), 1, label_weight=1.0)
    with pytest.raises(NormSwapError, match="frozen"):
        heal(tiny_model("bert"), encoder.requires_grad_(False), tokens(), 1)
    with torch.no_grad():
        converted.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(NormSwapError, match="learning_rate"):
        heal(model, converted, tokens(), 1)
