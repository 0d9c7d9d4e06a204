"""Structured pruning (related/structured.py) on random models of four blocks: every score, count
and fit against its definition, and every kind of pruned folder through what loads and runs it."""

import json
import math
import re

import pytest
import torch
import toy
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

import config
import data
import models
import rollout
import update
from bench import __main__ as command_line
from bench import structured as bench
from related import pruned, recovery, stream, structured, text
from runtime import InputError
from tasks import arithmetic

TOKENIZER = arithmetic.make_tokenizer()
IDS = torch.randint(0, 256, (3, 7), generator=torch.Generator().manual_seed(1))


def make(family="Qwen3", **changes):
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(TOKENIZER), "hidden_size": 16, "intermediate_size": 24, "head_dim": 8,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
        "initializer_range": 0.3, "max_position_embeddings": 512, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": TOKENIZER.eos_token_id,
    }  # fmt: skip
    made = getattr(transformers, f"{family}Config")(**shape | changes)
    model = AutoModelForCausalLM.from_config(made).eval()
    model.generation_config = GenerationConfig(eos_token_id=TOKENIZER.eos_token_id, pad_token_id=0)
    return model


def save(model, folder):
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids, use_cache=False).logits


@torch.no_grad()
def without(model, removed, ids=IDS):
    """Logits of the model with hooks that turn what these sub-layers add into zeros."""
    hooks = []
    for name in removed:
        zero = lambda _m, _i, out: (0 * out[0], *out[1:]) if isinstance(out, tuple) else 0 * out
        hooks.append(model.get_submodule(f"model.layers.{name}").register_forward_hook(zero))
    found = logits(model, ids)
    for hook in hooks:
        hook.remove()
    return found


def nll(found, ids=IDS):
    logprobs = found[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
    return -logprobs.mean(dim=(1, 2))  # [N]


# ------------------------------------------------------------------------- the stream


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_stream_is_the_model(family):
    """The sub-layers added one by one are the model; without some, the model without those."""
    model = make(family)
    with torch.no_grad():
        names = stream.all_names(model)
        states = stream.states(model, stream.embed(model, IDS), names)
        assert torch.allclose(stream.logits(model, states[-1]), logits(model), atol=1e-5)
        left = [name for name in names if name not in ("1.self_attn", "2.mlp")]
        last = stream.states(model, stream.embed(model, IDS), left)[-1]
        found = stream.logits(model, last)
    assert torch.allclose(found, without(model, ["1.self_attn", "2.mlp"]), atol=1e-5)
    expected = nll(logits(model)).mean().item()
    assert stream.mean_loss(model, IDS) == pytest.approx(expected, abs=1e-5)


# ------------------------------------------------------------------------- scores


@pytest.mark.parametrize("kind", structured.UNITS)
def test_scores_are_their_definitions(kind):
    """From transformers' own forward, with hooks. Catches a unit that is off by one, a distance
    that is not relative, a mean over samples that is a sum, and a sign."""
    model = make()
    units = structured.units_of(model, kind)
    found = {m: structured.importance(model, IDS, units, m) for m in structured.METHODS[1:6]}
    whole, seen = logits(model), {}
    for name in stream.all_names(model):  # the norm's input is the stream before the sub-layer
        number, part = name.split(".")
        norm = model.get_submodule(f"model.layers.{number}.{pruned.NORMS[part]}")
        norm.register_forward_pre_hook(lambda _m, args, name=name: seen.update({name: args[0]}))
    model.model.norm.register_forward_pre_hook(lambda _m, args: seen.update(end=args[0]))
    logits(model)
    inputs = dict(seen)  # the hooks go on
    order = [*stream.all_names(model), "end"]
    for u, unit in enumerate(units):
        before, after = inputs[unit[0]], inputs[order[order.index(unit[-1]) + 1]]
        change = after - before
        cosine = (before * after).sum(-1) / (before.norm(dim=-1) * after.norm(dim=-1))
        gone = without(model, unit)
        expected = {
            "cosine": 1 - cosine.mean(),
            "l1": (change.abs().sum(-1) / before.abs().sum(-1)).mean(),
            "l2": (change.square().sum(-1).sqrt() / before.square().sum(-1).sqrt()).mean(),
            "logit": (gone - whole).square().sum(-1).sqrt().mean(),
            "loss": (nll(gone) - nll(whole)).mean(),
        }
        for metric, value in expected.items():
            assert found[metric][u].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-5)


def test_shapley(monkeypatch):
    """The subnetworks are halves and their complements, and the scores the difference of means over
    them. Catches a sign, and means that are not over those with and without the unit."""
    model = make()
    seen = []

    def made_up(_model, _sequences, names):
        seen.append((set(names), len(seen) ** 2 + 0.5))
        return seen[-1][1]

    monkeypatch.setattr(stream, "mean_loss", made_up)
    units = structured.units_of(model, "blocks")
    scores = structured.importance(model, IDS, units, "shapley", seed=3)
    assert len(seen) == structured.SUBNETWORKS
    for (one, _), (other, _) in zip(seen[::2], seen[1::2], strict=True):
        assert one | other == set(stream.all_names(model))
        assert not one & other
        assert len(one) == 4
    assert len({frozenset(names) for names, _ in seen}) > 2
    for unit, score in zip(units, scores, strict=True):
        present = [loss for names, loss in seen if set(unit) <= names]
        absent = [loss for names, loss in seen if not set(unit) & names]
        expected = sum(absent) / len(absent) - sum(present) / len(present)
        assert score.item() == pytest.approx(expected, rel=1e-5)


def test_random_follows_the_seed():
    """Catches a seed that is ignored."""
    model = make()
    units = structured.units_of(model, "blocks")
    draw = lambda seed: structured.importance(model, IDS, units, "random", seed).tolist()
    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


def test_least_important():
    """The lowest scores go, as many as come nearest to the share. Catches a descending sort, and
    a share of the whole model instead of the blocks."""
    model = make()
    scores = torch.tensor([3.0, 1.0, 4.0, 2.0])
    go = lambda kind, sparsity: structured.least_important(
        model, structured.units_of(model, kind), scores, sparsity
    )
    assert go("blocks", 0.26) == ["1.self_attn", "1.mlp"]
    assert go("blocks", 0.6) == ["1.self_attn", "1.mlp", "3.self_attn", "3.mlp"]
    attention = (
        16 * 16 * 2 + 16 * 8 * 2 + 2 * 8 + 16
    )  # projections, norms of queries and keys, norm
    ffn = 3 * 16 * 24 + 16
    assert go("attention", 2.1 / 4 * attention / (attention + ffn)) == [
        "1.self_attn",
        "3.self_attn",
    ]
    assert go("ffn", 3 / 4 * ffn / (attention + ffn)) == ["1.mlp", "3.mlp", "0.mlp"]
    with pytest.raises(InputError, match=r"--sparsity 0.5: from 0.\d+ to 0.\d+ of the blocks"):
        go("attention", 0.5)


# ------------------------------------------------------------------------- 2ssp


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0.5, 12, 8, 4, 8, 144), (5, 4)),  # 12 * 0.5**(4/3) = 4.76; (72 - 20) / 12 = 4.3 of 8
        ((0.25, 30, 1536, 884_736, 2_654_208, 106_202_880), (2, 1058)),  # SmolLM2-135M
        ((0.375, 30, 1536, 884_736, 2_654_208, 106_202_880), (4, 836)),
        ((0.5, 30, 1536, 884_736, 2_654_208, 106_202_880), (8, 648)),
    ],
)  # fmt: skip
def test_two_stage_counts(arguments, expected):
    """Against counts by hand. Catches an exponent upside down, an alpha that multiplies, and
    attentions that are not taken off the neurons' share."""
    assert structured.two_stage_counts(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ((0.999, 30, 1536, 884_736, 2_654_208, 106_202_880), r"0 of 30 attentions"),
        ((0.97, 4, 8, 1, 100, 404), r"3 of 4 attentions and 0 of 8"),
        ((0.1, 12, 8, 100, 50, 1800), r"6 of 12 attentions and \d+ of 8"),  # attentions alone: 0.33
    ],
)
def test_two_stage_refuses_what_it_cannot_reach(arguments, kept):
    with pytest.raises(InputError, match=f"--sparsity {arguments[0]}: 2ssp would keep {kept}"):
        structured.two_stage_counts(*arguments)


def test_neuron_scores():
    """The norm over tokens, then the mean over samples. Catches the other order of the two, and a
    score before the gate."""
    model = make("Llama")
    inner = {}
    for number, block in enumerate(model.model.layers):
        block.mlp.down_proj.register_forward_pre_hook(
            lambda _m, args, number=number: inner.update({number: args[0]})
        )
    logits(model)
    expected = torch.stack([inner[b].square().sum(1).sqrt().mean(0) for b in range(4)])
    assert torch.allclose(structured.neuron_scores(model, IDS), expected, rtol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_dead_neurons_change_nothing(family, tmp_path):
    """Neurons whose output is 0 score 0, and the model without them is the same function. So it is
    after stock transformers has loaded it. Catches a down projection that keeps other columns."""
    model = make(family, **({"mlp_bias": True} if family == "Llama" else {}))
    with torch.no_grad():
        for number, block in enumerate(model.model.layers):
            for tensor in block.mlp.up_proj.parameters():
                tensor[number : number + 10] = 0
    before = logits(model)
    scores = structured.neuron_scores(model, IDS)
    assert ((scores == 0).sum(dim=1) == 10).all()
    pruned.keep_neurons(model, scores.topk(14).indices.sort().values)
    assert torch.allclose(logits(model), before, atol=1e-5)
    smaller = pruned.rebuild(model, [])
    assert type(smaller) is type(model)
    assert smaller.config.intermediate_size == 14
    assert stream.size(smaller.model.layers[0].mlp) == 14 * (3 * 16 + 2 * (family == "Llama")) + (
        16 * (family == "Llama")
    )
    loaded = AutoModelForCausalLM.from_pretrained(save(smaller, tmp_path))
    assert torch.equal(logits(loaded), logits(smaller))


def test_cheapest_attentions():
    """Greedy, by the loss without all that are gone so far. Catches a loss on the whole model, and
    the dearest in place of the cheapest."""
    model = make()
    found = structured.cheapest_attentions(model, IDS[:1], 3)
    gone = []
    for name in found:
        others = [f"{b}.self_attn" for b in range(4) if f"{b}.self_attn" not in gone]
        losses = {o: nll(without(model, [*gone, o], IDS[:1]), IDS[:1]).item() for o in others}
        assert name == min(losses, key=losses.get)
        gone.append(name)


def test_two_stage():
    """The shares of both stages add up to the sparsity, and the given model stays as it was.
    Catches attentions that are chosen before the neurons are gone."""
    model = make(num_hidden_layers=8)
    before = logits(model)
    whole = stream.size(model.model.layers)
    smaller = structured.prune(model, IDS, "2ssp", 0.5)
    assert torch.equal(logits(model), before)
    assert stream.size(smaller.model.layers) / whole == pytest.approx(0.5, abs=0.02)
    removed = smaller.config.removed_sublayers
    assert len(removed) > 0
    assert {name.split(".")[1] for name in removed} == {"self_attn"}
    narrow = pruned.rebuild(model, [])
    scores = structured.neuron_scores(model, IDS)
    kept = scores.topk(smaller.config.intermediate_size).indices.sort().values
    pruned.keep_neurons(narrow, kept)
    assert set(structured.cheapest_attentions(narrow, IDS[:1], len(removed))) == set(removed)
    assert torch.allclose(logits(smaller), without(narrow, removed), atol=1e-5)


# ------------------------------------------------------------------------- folders


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_blocks_leave_a_plain_folder(family, tmp_path):
    """Stock transformers loads it, and it is a forward through the other blocks, in their order.
    Catches blocks that are renumbered wrongly, and kinds of layers that stay as many."""
    model = make(family, tie_word_embeddings=family == "Llama")
    model.generation_config.eos_token_id = [7, 8]
    loaded = pruned.rebuild(model, ["2.mlp", "0.self_attn", "2.self_attn", "0.mlp"])
    assert not loaded.training
    loaded = AutoModelForCausalLM.from_pretrained(save(loaded, tmp_path))
    assert type(loaded) is type(model)
    assert loaded.generation_config.eos_token_id == [7, 8]
    assert len(loaded.model.layers) == loaded.config.num_hidden_layers == 2
    assert len(getattr(loaded.config, "layer_types", None) or "ab") == 2
    with torch.no_grad():
        h = model.model.embed_tokens(IDS)
        rope = model.model.rotary_emb(h, torch.arange(7)[None])
        for block in (model.model.layers[1], model.model.layers[3]):
            h = block(h, position_embeddings=rope, attention_mask=None)
        expected = model.lm_head(model.model.norm(h))
    assert torch.allclose(logits(loaded), expected, atol=1e-5)


REMOVED = ["3.self_attn", "1.mlp", "0.self_attn", "1.self_attn", "2.mlp"]


@pytest.fixture(params=["Llama", "Qwen2", "Qwen3"])
def without_sublayers(request, tmp_path):
    """(whole model, folder of the model without REMOVED; a block of it is gone)."""
    model = make(request.param)
    return model, save(pruned.rebuild(model, REMOVED), tmp_path / "pruned")


def test_load_policy_applies_removed_sublayers(without_sublayers, tmp_path):
    """The tensors are gone from the folder, and the logits are those without what they added; and
    again after it was saved as train.py saves it."""
    model, folder = without_sublayers
    described = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert described["model_type"] == f"pruned_{model.config.model_type}"
    assert described["removed_sublayers"] == dict.fromkeys(["2.self_attn", "0.self_attn", "1.mlp"])
    loaded, _ = models.load_policy(folder, "cpu")
    gone = (stream.size(*stream.parts(model, name)) for name in REMOVED)
    assert stream.size(loaded) == stream.size(model) - sum(gone)
    assert torch.allclose(toy.plain_logits(loaded, IDS), without(model, REMOVED), atol=1e-5)
    loaded.save_pretrained(tmp_path / "again")
    TOKENIZER.save_pretrained(tmp_path / "again")
    again, _ = models.load_policy(str(tmp_path / "again"), "cpu")
    assert torch.equal(toy.plain_logits(again, IDS), toy.plain_logits(loaded, IDS))


def test_stock_transformers_refuses_removed_sublayers(without_sublayers, monkeypatch):
    """Without our classes there is an error, and not a model with weights made up."""
    model, folder = without_sublayers
    kind = f"pruned_{model.config.model_type}"
    monkeypatch.delitem(transformers.CONFIG_MAPPING._extra_content, kind)
    with pytest.raises(ValueError, match=f"model type `{kind}`"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_pruned_models_sample_and_train(without_sublayers):
    """Both engines draw the same from it, on prompts of unequal lengths, with the log-probs of the
    packed forward. Catches attentions that are not numbered anew: the cache's first entry would
    stay empty, and the next tokens would take the wrong positions."""
    _, folder = without_sublayers
    loaded, tokenizer = models.load_policy(folder, "cpu")
    prompts = [[1, 2, 3], [4], [5, 6]]
    found = {}
    for engine in ("compact", "hf"):
        sampling = rollout.Sampling.for_policy(loaded, tokenizer, 6, engine=engine)
        found[engine] = rollout.sample(loaded, prompts, sampling, group_size=3, seed=5)
    ours, theirs = found.values()
    inside = torch.arange(6) < ours.lengths[..., None]
    assert torch.equal(ours.completion_ids[inside], theirs.completion_ids[inside])
    cfg = config.resolve(config.Config(device="cpu"))
    logprobs = update.trainer_logprobs(loaded, ours, cfg)
    assert torch.allclose(logprobs, ours.logprobs, atol=1e-4)
    assert torch.allclose(theirs.logprobs, ours.logprobs, atol=1e-4)


@pytest.mark.parametrize("recover", ["none", "lowrank"])
def test_pruned_policy_is_trained(recover, policy_folder, tmp_path):
    """train.py takes such a folder, every weight of it gets a gradient, and its checkpoint is such
    a folder again. Catches norms that stay where nothing reads them."""
    model, tokenizer = models.load_policy(policy_folder, "cpu")
    model.set_attn_implementation("sdpa")
    options = {"units": "attention", "recovery": recover, "rank": 2}
    smaller = structured.prune(model, IDS, "l2", 0.2, **options)
    smaller.save_pretrained(tmp_path / "smaller")
    tokenizer.save_pretrained(tmp_path / "smaller")
    changes = {"steps": 2, "save_every": 2, "method": "grpo"}
    toy.main(toy.flags(str(tmp_path / "smaller"), str(tmp_path / "out"), **changes))
    trained, _ = models.load_policy(str(tmp_path / "out" / "checkpoint"), "cpu")
    assert trained.config.removed_sublayers == smaller.config.removed_sublayers
    assert len(trained.config.removed_sublayers) == 1
    before = smaller.state_dict()
    assert all(not torch.equal(before[name], value) for name, value in trained.state_dict().items())


# ------------------------------------------------------------------------- recovery


def objective(x, y, bias, matrix, penalty):
    return (y - bias - x @ matrix).square().sum() + penalty * matrix.square().sum()


def test_fit_is_the_best_map_of_its_rank():
    """Against the singular vectors of the fitted outputs, of ordinary least squares with the
    penalty as further rows; no map nearby is better. Catches the smallest directions instead of
    the largest, and a bias that forgets the inputs' mean."""
    torch.manual_seed(0)
    x = torch.randn(50, 6).double() @ torch.randn(6, 6).double() + 3
    y = x @ torch.randn(6, 6).double() + torch.randn(50, 6).double()
    bias, down, up = recovery.fit(x, y, 2, ridge=0.1)
    assert (down.shape, up.shape) == ((2, 6), (6, 2))
    matrix = (up @ down).T
    centered = x - x.mean(0)
    penalty = 0.1 * centered.square().sum() / 6
    rows = torch.cat([centered, penalty.sqrt() * torch.eye(6).double()])
    least = torch.linalg.lstsq(rows, torch.cat([y - y.mean(0), torch.zeros(6, 6).double()]))
    directions = torch.linalg.svd(rows @ least.solution).Vh[:2]
    assert torch.allclose(matrix, least.solution @ directions.T @ directions)
    best = objective(x, y, bias, matrix, penalty)
    for _ in range(20):
        near = [t + 1e-3 * torch.randn_like(t) for t in (bias, down, up)]
        assert objective(x, y, near[0], (near[2] @ near[1]).T, penalty) > best


def test_full_rank_reproduces_a_linear_sublayer():
    """The attention of a single token is linear, so its stand-in is the same function."""
    model = make("Llama")
    tokens = torch.arange(256)[:, None]  # 256 sequences of one token
    before = logits(model, tokens)
    tensors = recovery.recover(model, tokens, ["1.self_attn", "2.self_attn"], 16, ridge=1e-12)
    smaller = pruned.rebuild(model, ["1.self_attn", "2.self_attn"], 16, tensors)
    assert torch.allclose(logits(smaller, tokens), before, atol=1e-3)
    assert not torch.allclose(without(model, ["1.self_attn"], tokens), before, atol=1e-1)


def test_bias_is_fitted_behind_earlier_ones(tmp_path):
    """Each bias is the mean update behind the biases before it, whatever the order of removal; the
    folder holds them. Catches fits on the whole model's stream."""
    model = make()
    removed = ["2.mlp", "0.self_attn", "0.mlp"]
    tensors = recovery.recover(model, IDS, removed, 0)
    smaller = pruned.rebuild(model, removed, 0, tensors)
    loaded, _ = models.load_policy(save(smaller, tmp_path), "cpu")
    loaded.set_attn_implementation("sdpa")
    assert torch.equal(logits(loaded), logits(smaller))
    assert loaded.config.removed_sublayers == dict.fromkeys(removed, 0)
    with torch.no_grad():
        h = model.model.embed_tokens(IDS)
        for name in stream.all_names(model):
            change = stream.update(model, name, h)[1]
            if name in removed:
                change = change.mean(dim=(0, 1))
                stand_in, norm = stream.parts(loaded, name)
                assert torch.allclose(stand_in.bias, change, atol=1e-5)
                assert stream.size(stand_in, norm) == 16
            h = h + change
        assert torch.allclose(stream.logits(model, h), logits(loaded), atol=1e-5)


# ------------------------------------------------------------------------- the command


BAD = [
    ({"sparsity": 0.0}, "--sparsity 0.0: must be above 0 and below 1"),
    ({"sparsity": 1.0}, "--sparsity 1.0: must be"),
    ({"sparsity": 0.05}, "--sparsity 0.05: from 0.250 to 0.750 of the blocks"),
    ({"sparsity": 0.95}, "--sparsity 0.95: from 0.250 to 0.750 of the blocks"),
    ({"method": "3ssp"}, "--method 3ssp: use one of 2ssp, cosine"),
    ({"units": "heads"}, "--units heads: use one of blocks, attention, ffn"),
    ({"recovery": "all"}, "--recovery all: use one of none, bias, lowrank"),
    ({"recovery": "lowrank", "rank": 0}, "--rank 0: use 1 to the hidden size, 16"),
    ({"recovery": "lowrank", "rank": 17}, "--rank 17: use 1 to the hidden size, 16"),
    ({"method": "2ssp", "units": "ffn"}, "--units ffn: 2ssp has its own"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_values(changes, message):
    options = {"method": "cosine", "sparsity": 0.25} | changes
    with pytest.raises(InputError, match=re.escape(message)):
        structured.prune(make(), IDS, **options)


def test_other_models_are_refused():
    other = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16)
    with pytest.raises(InputError, match=r"gpt2: use one of llama, qwen2, qwen3"):
        structured.prune(AutoModelForCausalLM.from_config(other), IDS, "cosine", 0.25)


def test_text(tmp_path, monkeypatch):
    """Nine tenths calibrate and one is held out, in windows spread over each. Catches windows that
    overlap, and held-out text that was calibrated on."""
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(97 + number % 26) for number in range(1000)))
    calibration, held_out = text.read(str(file), TOKENIZER, 4, 20)
    every = torch.tensor(TOKENIZER(file.read_text())["input_ids"])
    assert torch.equal(calibration, every[:900].view(4, 225)[:, :20])
    assert torch.equal(held_out, every[900:].view(4, 25)[:, :20])
    for samples, tokens in ((5, 21), (0, 20), (4, 1)):
        with pytest.raises(InputError, match=f"--samples {samples} of --tokens {tokens}"):
            text.read(str(file), TOKENIZER, samples, tokens)
    with pytest.raises(InputError, match=r"missing.txt: no such file"):
        text.read(str(tmp_path / "missing.txt"), TOKENIZER, 4, 20)
    assert text.read("python-docs", TOKENIZER, 3, 50).shape == (2, 3, 50)
    monkeypatch.setattr(text, "topics", {"a": "ab\n\ncd", "b": "cd\n\nab"})
    with pytest.raises(InputError, match="1 tokens of python-docs are held out"):  # of ab, cd
        text.read("python-docs", TOKENIZER, 3, 50)
    monkeypatch.setattr(data.word_problems, "SFT_PROBLEMS", 100)
    words = text.read("words", TOKENIZER, 3, 200)
    assert all("How" in TOKENIZER.decode(part.flatten()) for part in words)
    assert all("boxed" in TOKENIZER.decode(part.flatten()) for part in words)


def test_command(tmp_path, capsys):
    """From a folder to a folder and a table. Catches a perplexity on the calibration text, and an
    --out-dir that is written over."""
    model = make("Llama")
    folder = save(model, tmp_path / "whole")
    file = tmp_path / "text.md"
    file.write_text(" ".join(map(str, range(900))))
    options = {"model": folder, "data": str(file), "samples": 2, "tokens": 50}
    options |= {"method": "cosine", "sparsity": 0.5, "out_dir": tmp_path / "half"}
    structured.main(**options)
    table = capsys.readouterr().out
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert type(smaller) is type(model)
    held_out = text.read(str(file), TOKENIZER, 2, 50)[1]
    perplexities = [math.exp(nll(logits(m, held_out), held_out).mean()) for m in (model, smaller)]
    row = re.search(r"held-out perplexity +([\d.,]+) +([\d.,]+)", table).groups()
    assert [float(v.replace(",", "")) for v in row] == pytest.approx(perplexities, rel=1e-3)
    assert re.search(r"of the blocks .* 0.500\n", table)
    assert "of type llama" in table
    with pytest.raises(InputError, match=r"--out-dir .*half exists: give another"):
        structured.main(**options)


def test_bench(tmp_path, monkeypatch):
    """A row for each method, sparsity, seed and recovery; rows that are there stay. Catches rows
    under another's name, and a second run that repeats the first."""
    monkeypatch.setattr(bench, "DECODED", 2)
    folder = save(make("Llama"), tmp_path / "whole")
    file = tmp_path / "text.md"
    file.write_text(" ".join(map(str, range(900))))
    line = f"structured --model {folder} --data {file} --samples 2 --tokens 50 --seeds 2 --rank 4"
    line += f" --sparsities 0.25 0.5 --units blocks ffn --recovered cosine --json {tmp_path}/rows"
    command_line.main(f"{line} --methods cosine random".split())
    rows = json.loads((tmp_path / "rows").read_text())
    assert len(rows) == 1 + 2 * 2 * 3 + 2 * 2 * 2
    policy, _ = models.load_policy(folder, "cpu")
    policy.set_attn_implementation("sdpa")
    calibration, held_out = text.read(str(file), TOKENIZER, 2, 50)
    for row in rows[1:]:
        names = ("method", "sparsity", "units", "recovery", "rank", "seed")
        smaller = structured.prune(policy, calibration, *(row[name] for name in names))
        assert stream.size(smaller) == row["parameters"]
        assert math.exp(stream.mean_loss(smaller, held_out)) == pytest.approx(row["perplexity"])
    monkeypatch.setattr(structured, "importance", lambda *_: pytest.fail("scored again"))
    command_line.main(f"{line} --methods cosine random 2ssp".split())
    more = json.loads((tmp_path / "rows").read_text())
    assert more[: len(rows)] == rows
    assert [row["method"] for row in more[len(rows) :]] == ["2ssp", "2ssp"]
