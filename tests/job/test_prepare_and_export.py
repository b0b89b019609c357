"""From job file to prepared directory, to a checkpoint, to a Hugging Face directory, and back into a new job."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from starlings_job.checkpoint import CheckpointWriter, load_manifest, read_block
from starlings_job.data.tokenizer import decode_text
from starlings_job.errors import DiskFull, ExportError, JobFileError, NoDataMatched, NotPrepared
from starlings_job.export import export_checkpoint
from starlings_job.model import decode_records, loss_sum, raw_tensor
from starlings_job.prepare import prepare
from starlings_job.prepared import checkpoint_url, is_prepared, load_prepared, load_profile
from starlings_job.records import RecordStore
from starlings_job.reference import ReferenceRun, evaluate, load_whole, train_reference
from starlings_job.spec import JobSpec, load_job
from support.small_families import SMALL

GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def job_file(folder: Path, model: str = 'preset = "micro"', extra: str = "", data: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(20):
        text = "".join(f"line {i} of file {number}: the cat sat on the mat.\n" for i in range(10))
        (folder / f"text{number}.txt").write_text(text)
    path = folder / "job.toml"
    path.write_text(
        f'[job]\nname = "little"\ntokens = 20000\nseed = 3\n[model]\n{model}\n'
        f'[data]\nsource = "text*.txt"\nsequence_length = 32\nheld_out = 16\n{data}\n'
        f"[train]\nbatch = 8\nmicrobatch = 4\n{extra}\n"
    )
    return path


def save(job_dir: Path, run: ReferenceRun, version: int) -> None:
    job = load_prepared(job_dir)
    with CheckpointWriter(checkpoint_url(job_dir, job), version) as writer:
        for block in job.description.blocks:
            tensors = {f"param:{n}": raw_tensor(t) for (b, n), t in run.state.items() if b == block}
            writer.add_block(block, tensors)
        writer.finish({"tokens": version})


def test_prepare_writes_what_a_coordinator_serves(tmp_path: Path) -> None:
    said: list[tuple[str, float, str]] = []
    facts = prepare(job_file(tmp_path / "a"), tmp_path / "out", lambda *news: said.append(news))
    assert {phase for phase, _, _ in said} == {"text", "weights", "profile"}
    assert all(0 <= fraction <= 1 for _, fraction, _ in said)
    job = load_prepared(tmp_path / "out")
    assert job.description.blocks == ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "head")
    profile = load_profile(tmp_path / "out")
    assert facts["parameters"] == profile.parameter_count
    with RecordStore(tmp_path / "out") as store:
        assert store.population == facts["samples"]
        assert len(store.read([0])) == profile.record_bytes
        text = decode_text(tmp_path / "out", store.held_out_tokens(0, 8))
        assert text == "line 0 o"
    # What workers get holds no path of the owner.
    sent = JobSpec.from_json(job.to_json())
    assert str(tmp_path) not in job.to_json().decode()
    assert b"text*.txt" not in job.to_json()
    assert sent.description == job.description
    assert sent.dataset == job.dataset
    assert sent.digest() == job.digest()
    assert [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")] == []


def test_the_same_job_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        prepare(job_file(tmp_path / name), tmp_path / f"out-{name}")
    for path in sorted((tmp_path / "out-a").rglob("*")):
        if path.is_file():
            twin = tmp_path / "out-b" / path.relative_to(tmp_path / "out-a")
            assert path.read_bytes() == twin.read_bytes(), path.name


def test_a_second_prepare_leaves_things_alone_or_refuses(tmp_path: Path) -> None:
    path = job_file(tmp_path / "a")
    prepare(path, tmp_path / "out")
    stamp = (tmp_path / "out" / "tokens.bin").stat().st_mtime_ns
    longer = path.read_text().replace("tokens = 20000", "tokens = 40000")
    path.write_text(longer)
    assert prepare(path, tmp_path / "out")["already_prepared"]
    assert load_prepared(tmp_path / "out").job.tokens == 40000
    assert (tmp_path / "out" / "tokens.bin").stat().st_mtime_ns == stamp
    path.write_text(longer.replace("seed = 3", "seed = 4"))
    with pytest.raises(NotPrepared, match="prepared for another job"):
        prepare(path, tmp_path / "out")
    with pytest.raises(NotPrepared, match="prepared for another job"):
        load_prepared(tmp_path / "out", load_job(path))
    with pytest.raises(NotPrepared, match="is not prepared"):
        load_prepared(tmp_path / "nowhere")


def test_a_full_disk_leaves_no_half_prepared_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job_file(tmp_path / "a")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for target in ("write_text", "save_tokenizer", "_move_in", "measure_profile"):
        with monkeypatch.context() as patch:
            patch.setattr(f"starlings_job.prepare.{target}", full)
            with pytest.raises(DiskFull, match="disk is full") as caught:
                prepare(path, tmp_path / "out")
        assert caught.value.exit_code == 9
        assert not (tmp_path / "out").exists()
    # A directory with other things in it is as it was.
    (tmp_path / "out" / "ca").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr("starlings_job.prepare.measure_profile", full)
        with pytest.raises(DiskFull):
            prepare(path, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["ca"]
    prepare(path, tmp_path / "out")
    assert is_prepared(tmp_path / "out")


@pytest.mark.parametrize(
    ("model", "extra", "data", "error", "said"),
    [
        ('config = "absent.json"', "", "", JobFileError, "cannot read the configuration"),
        ('from = "absent"', "", "", JobFileError, "there is no directory"),
        (
            'preset = "micro"',
            'trainable = "*.experts.*"',
            "",
            JobFileError,
            "matches no parameter; one is called",
        ),
        ('preset = "micro"', "", 'tokenizer = "absent"', JobFileError, 'write "bytes", or the path'),
        ('config = "small.json"', "", "", JobFileError, "tokenizer has 256 tokens, the model only 100"),
        ('config = "short.json"', "", "", JobFileError, "sequence_length = 32 is more than the model takes"),
    ],
)
def test_what_cannot_be_prepared(
    tmp_path: Path, model: str, extra: str, data: str, error: type[Exception], said: str
) -> None:
    path = job_file(tmp_path / "a", model, extra, data)
    (tmp_path / "a" / "small.json").write_text(json.dumps({**GPT2, "vocab_size": 100}))
    (tmp_path / "a" / "short.json").write_text(json.dumps({**GPT2, "n_positions": 16}))
    with pytest.raises(error) as caught:
        prepare(path, tmp_path / "out")
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_text_that_matches_nothing(tmp_path: Path) -> None:
    path = job_file(tmp_path / "a")
    path.write_text(path.read_text().replace("text*.txt", "poems/*.txt"))
    with pytest.raises(NoDataMatched, match="poems"):
        prepare(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "untie"),
    [
        ({**GPT2, "tie_word_embeddings": True}, False),
        ({**GPT2, "tie_word_embeddings": True}, True),
        ({"model_type": "qwen3_moe", **SMALL["qwen3_moe"], "vocab_size": 256}, False),
        ({"model_type": "gemma3_text", **SMALL["gemma3_text"], "vocab_size": 256}, True),
        (None, False),
    ],
    ids=["tied", "untied", "qwen3_moe", "gemma3_text", "llama"],
)
def test_export_loads_in_transformers_and_starts_a_second_job(
    tmp_path: Path, config: dict[str, Any] | None, untie: bool
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = 'preset = "micro"' if config is None else f'config = "c.json"\nuntie = {str(untie).lower()}'
    path = job_file(tmp_path / "a", model)
    (tmp_path / "a" / "c.json").write_text(json.dumps(config))
    first = tmp_path / "first"
    prepare(path, first)
    with pytest.raises(ExportError, match="no checkpoint yet"):
        export_checkpoint(first, tmp_path / "model")
    run = train_reference(first, 6)
    assert run.losses[-1] < run.losses[0] - 0.1
    save(first, run, 6)
    facts = export_checkpoint(first, tmp_path / "model")
    assert facts["version"] == 6
    assert facts["parameters"] == load_profile(first).parameter_count
    with pytest.raises(ExportError, match="not empty"):
        export_checkpoint(first, tmp_path / "model")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    description = load_prepared(first).description
    expected = load_whole(first, description)
    with torch.no_grad():
        for (block, name), tensor in run.state.items():
            full = description.hugging_face_name(block, name)
            dict(expected.named_parameters(remove_duplicate=False))[full].copy_(tensor)
    ids = tokenizer("the cat", return_tensors="pt").input_ids
    assert ids.tolist() == [list(b"the cat")]
    assert torch.equal(loaded(ids).logits, expected(ids).logits)
    odd = "naïve \U0001f426\n\x00"
    assert tokenizer.decode(tokenizer(odd).input_ids) == odd

    # A second job from the export: its first loss is the exported model's loss.
    again = job_file(tmp_path / "b", f'from = "{tmp_path / "model"}"')
    prepare(again, tmp_path / "second")
    second = train_reference(tmp_path / "second", 1)
    job = load_prepared(tmp_path / "second")
    assert job.dataset.tokenizer == "bytes"
    with RecordStore(tmp_path / "second") as store:
        assert evaluate(load_whole(tmp_path / "second", job.description), store, 4) == pytest.approx(
            evaluate(expected, store, 4), abs=0
        )
        from starlings_job.sampling import samples_of_step

        batch = decode_records(store.read(samples_of_step(3, store.population, 0, 8)), store.meta)
    loss, count = loss_sum(loaded(batch.inputs, use_cache=False).logits, batch)
    assert second.losses[0] == pytest.approx(float(loss.detach()) / count, rel=1e-6)


def test_sharded_half_precision_directories_are_taken(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = LlamaForCausalLM(config).to(torch.bfloat16)
    whole.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    prepare(job_file(tmp_path / "a", f'from = "{tmp_path / "hf"}"'), tmp_path / "out")
    description = load_prepared(tmp_path / "out").description
    loaded = load_whole(tmp_path / "out", description)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, whole.state_dict()[name].float())
    for shard in (tmp_path / "hf").glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:50])
    with pytest.raises(JobFileError, match=r"does not fit the file|do not fit|malformed"):
        prepare(job_file(tmp_path / "a", f'from = "{tmp_path / "hf"}"'), tmp_path / "other")
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    with pytest.raises(JobFileError, match="never pickled weights"):
        prepare(job_file(tmp_path / "a", f'from = "{tmp_path / "hf"}"'), tmp_path / "other")


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    path = job_file(tmp_path / "a", f'from = "{tmp_path / "hf"}"')
    for change, match in (
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"has model\.layers\.1\."),
        ({"intermediate_size": 48}, "has shape"),
    ):
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**said, **change}))
        with pytest.raises(JobFileError, match=match):
            prepare(path, tmp_path / "out")


def test_a_classifier_is_prepared_trained_and_started_from_its_export(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[job]\nname = "shapes"\ntokens = 2000\n[model]\npreset = "shapes"\n'
        "[data]\nheld_out = 64\n[train]\nbatch = 32\nmicrobatch = 8\nlr = 0.02\nweight_decay = 0.0\n"
    )
    prepare(path, tmp_path / "out")
    job = load_prepared(tmp_path / "out")
    assert job.steps_total == 63
    assert len(job.description.blocks) == 5
    run = train_reference(tmp_path / "out", 30)
    assert sum(run.losses[-5:]) < 0.9 * sum(run.losses[:5])
    save(tmp_path / "out", run, 30)
    export_checkpoint(tmp_path / "out", tmp_path / "model")
    path.write_text(
        path.read_text()
        .replace('preset = "shapes"', 'from = "model"')
        .replace("held_out", 'source = "shapes"\nheld_out')
    )
    assert load_job(path).steps_total == 63
    prepare(path, tmp_path / "second")
    for block in job.description.blocks:
        for name, raw in read_block(tmp_path / "second" / "weights", 0, block).items():
            assert raw.data == raw_tensor(run.state[block, name.removeprefix("param:")]).data


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    prepare(job_file(tmp_path / "a", extra='trainable = ["model.layers.*", "lm_head.*"]'), tmp_path / "out")
    profile = load_profile(tmp_path / "out")
    assert profile.blocks[0].trainable_count == 0
    run = train_reference(tmp_path / "out", 2)
    weights = tmp_path / "out" / "weights"
    embed = read_block(weights, 0, "embed")["param:embed_tokens.weight"]
    assert embed.data == raw_tensor(run.state["embed", "embed_tokens.weight"]).data
    layer = read_block(weights, 0, "layers.0")["param:mlp.up_proj.weight"]
    assert layer.data != raw_tensor(run.state["layers.0", "mlp.up_proj.weight"]).data


def test_weights_have_digests_and_no_optimizer(tmp_path: Path) -> None:
    prepare(job_file(tmp_path / "a"), tmp_path / "out")
    manifest = load_manifest(tmp_path / "out" / "weights", 0)
    assert tuple(sorted(manifest.blocks)) == tuple(sorted(load_prepared(tmp_path / "out").description.blocks))
    assert all(entry.optimizer is None for entry in manifest.blocks.values())


def test_sgd_reference_is_plain_gradient_descent(tmp_path: Path) -> None:
    """By hand for one step: w - lr * clip * g, with the mean gradient of the step."""
    settings = 'optimizer = "sgd"\nlr = 0.5\nwarmup = 0.0\nclip = 0.1\n'
    prepare(job_file(tmp_path / "a", extra=settings), tmp_path / "out")
    job = load_prepared(tmp_path / "out")
    model = load_whole(tmp_path / "out", job.description)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with RecordStore(tmp_path / "out") as store:
        from starlings_job.sampling import samples_of_step

        batch = decode_records(store.read(samples_of_step(3, store.population, 0, 8)), store.meta)
    loss, count = loss_sum(model(batch.inputs, use_cache=False).logits, batch)
    (loss / count).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    norm = torch.sqrt(
        sum(((g.double() ** 2).sum() for g in gradients.values() if g is not None), torch.zeros(()))
    )
    run = train_reference(tmp_path / "out", 1)
    assert run.gradient_norms[0] == pytest.approx(float(norm), rel=1e-5)
    factor = min(1.0, 0.1 / (float(norm) + 1e-6))
    for (block, name), tensor in run.state.items():
        full = job.description.hugging_face_name(block, name)
        torch.testing.assert_close(
            tensor, before[full] - 0.5 * factor * gradients[full], rtol=1e-5, atol=1e-7
        )
