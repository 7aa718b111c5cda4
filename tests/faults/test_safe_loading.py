"""Files are data: a pickle planted in every place where one is read is never run; names and archives stay inside."""

import ast
import html.parser
import io
import json
import os
import pickle
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fault_runs import as_arguments, check_error, command_line, small_config

import scalelong
from scalelong.data import load, load_text_encoder, load_vae
from scalelong.errors import RunError, ScaleLongError
from scalelong.files import cache_dir
from scalelong.runs.run import load_run
from scalelong.training.loop import train

SOURCE = Path(scalelong.__file__).parent


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, witness):
        self.witness = str(witness)

    def __reduce__(self):
        return (open, (self.witness, "w"))


def forms(witness, folder):
    """The bomb in every form that a pickle comes in."""
    objects = np.array([Bomb(witness)], dtype=object)
    folder.mkdir(exist_ok=True)
    (folder / "raw").write_bytes(pickle.dumps(Bomb(witness), protocol=2))
    torch.save({"state_dict": Bomb(witness)}, folder / "torch")
    torch.save(Bomb(witness), folder / "legacy", _use_new_zipfile_serialization=False)
    with open(folder / "npy", "wb") as file:
        np.save(file, objects, allow_pickle=True)
    with open(folder / "npz", "wb") as file:
        np.savez(file, images=objects, mu=objects, sigma=objects, labels=objects)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def armed(tmp_path_factory):
    """(witness, bombs); the bombs are shown to go off where pickles are trusted."""
    base = tmp_path_factory.mktemp("bombs")
    witness = base / "witness"
    bombs = forms(witness, base / "forms")
    pickle.loads(bombs["raw"]).close()
    assert witness.exists(), "this bomb would prove nothing"
    witness.unlink()
    return witness, bombs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("safe") / "run"
    train(small_config(train__steps=2, monitor__every=1), folder, quiet=True)
    return folder


def commands(folder):
    yield [*as_arguments(train__steps=3, monitor__every=1), f"--out={folder}", "-q"]
    yield ["sample", folder, "--n=1", "--steps=1", "--device=cpu"]
    yield ["report", folder]
    yield ["evaluate", folder, folder, "--compare"]


def use(capsys, folder):
    for command in commands(folder):
        code, err = command_line(capsys, *command)
        if code:
            check_error(code, err)


def go_through_run(capsys, tmp_path, finished, armed, places):
    witness, bombs = armed
    for name, form in places:
        folder = tmp_path / "run"
        shutil.copytree(finished, folder)
        (folder / name).write_bytes(bombs[form])
        use(capsys, folder)
        assert not witness.exists(), (name, form)
        shutil.rmtree(folder)
    return len(places)


def names_of(folder):
    """Every file of a run, and the pickled files that other tools would read instead."""
    here = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    others = ["model/diffusion_pytorch_model.bin", "model/pytorch_model.bin", "checkpoints/step-00000002/optimizer.pt"]
    return [*here, *others, "checkpoints/step-00000002/random_states_0.pkl", "evaluation.json"]


def test_a_pickle_in_place_of_any_file_of_a_run_does_not_run(capsys, tmp_path, finished, armed):
    chosen = ("raw", "torch", "legacy", "npz", "npy")
    places = [(name, chosen[k % 5]) for k, name in enumerate(names_of(finished))][::5]  # all of them in the long form
    go_through_run(capsys, tmp_path, finished, armed, places)


@pytest.mark.slow
def test_every_pickle_in_every_place_of_a_run_does_not_run(capsys, tmp_path, finished, armed, note):
    places = [(name, form) for name in names_of(finished) for form in armed[1]]
    tried = go_through_run(capsys, tmp_path, finished, armed, places)
    note("a planted pickle", "in place of each file of a run", tried, "never executed: skipped, or an error")


def test_without_its_safetensors_a_network_is_not_searched_in_a_pickle(tmp_path, finished, armed):
    witness, bombs = armed
    for form, bomb in bombs.items():
        folder = tmp_path / form
        shutil.copytree(finished, folder)
        (folder / "model" / "diffusion_pytorch_model.safetensors").unlink()
        (folder / "model" / "diffusion_pytorch_model.bin").write_bytes(bomb)
        with pytest.raises(RunError, match="diffusion_pytorch_model"):
            load_run(folder)
    assert not witness.exists()


def test_pickles_among_data_do_not_run(capsys, tmp_path, armed, note):
    witness, bombs = armed
    tried = 0
    for form, bomb in bombs.items():
        for name in (
            "x.npy",
            "x.npz",
            "x.zip",
            "x.tar",
            "x.tgz",
            "set/a.png",
            "set/metadata.jsonl",
            "set/data_batch_1",
        ):
            path = tmp_path / form / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bomb)
            target = path.parent if path.parent.name == "set" else path
            code, err = command_line(capsys, "data", "prepare", target)
            check_error(code, err)
            tried += 1
            path.unlink()
    assert not witness.exists()
    note("a planted pickle", "among data (.npy, .npz, archives, image folders)", tried, "never executed: an error")


def go_through_cache(capsys, tmp_path, armed, every):
    """Replace each file of the cache by each pickle, every `every`-th combination."""
    witness, bombs = armed
    np.savez(tmp_path / "set.npz", images=np.zeros((4, 8, 8), np.uint8), labels=np.arange(4))
    place, tried = load(str(tmp_path / "set.npz")).folder, 0
    files = sorted(path for path in Path(place).rglob("*") if path.is_file())
    assert files
    for k, path in enumerate(files):
        whole = path.read_bytes()
        for bomb in list(bombs.values())[k % every :: every]:
            path.write_bytes(bomb)
            for command in (["data", "info", tmp_path / "set.npz", "--verify"], ["data", "list"]):
                code, err = command_line(capsys, *command)
                if code:
                    check_error(code, err)
            code, err = command_line(
                capsys,
                *as_arguments(train__steps=1),
                f"--data={tmp_path / 'set.npz'}",
                f"--out={tmp_path / f'run-{tried}'}",
                "-q",
            )
            if code:
                check_error(code, err)
            tried += 1
        path.write_bytes(whole)
    assert tried
    assert not witness.exists()
    return tried


def test_pickles_in_the_cache_of_prepared_data_do_not_run(capsys, tmp_path, armed):
    go_through_cache(capsys, tmp_path, armed, every=5)


@pytest.mark.slow
def test_every_pickle_in_the_cache_of_prepared_data_does_not_run(capsys, tmp_path, armed, note):
    tried = go_through_cache(capsys, tmp_path, armed, every=1)
    note("a planted pickle", "in the cache of prepared data", tried, "never executed: an error, or made again")


def go_through_weights(capsys, tmp_path, armed, chosen, suffixes=(".pth", ".pt", ".safetensors", ".bin", ".npz")):
    witness, bombs = armed
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    from PIL import Image

    for k in range(3):
        Image.new("L", (8, 8), k).save(pictures / f"{k}.png")
    tried = 0
    for form, bomb in ((form, bombs[form]) for form in chosen):
        for suffix in suffixes:
            path = tmp_path / f"{form}{suffix}"
            path.write_bytes(bomb)
            with pytest.raises(ScaleLongError):
                scalelong.UViT.from_official(path, img_size=32, num_heads=8)
            options = ["evaluate", f"--images={pictures}", "--extractor=inception"]
            for more in ([f"--reference={pictures}", f"--weights={path}"], [f"--reference={path}"]):
                code, err = command_line(capsys, *options, *more)
                check_error(code, err)
            tried += 3
        for opened, config in (
            (load_vae, {"_class_name": "AutoencoderKL"}),
            (load_text_encoder, {"model_type": "clip"}),
        ):
            folder = tmp_path / f"{form}-{opened.__name__}"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
            for name in ("diffusion_pytorch_model.bin", "pytorch_model.bin", "model.safetensors", "tokenizer.json"):
                (folder / name).write_bytes(bomb)
            with pytest.raises(ScaleLongError):
                opened(str(folder))
            tried += 1
    assert not witness.exists()
    return tried


def test_pickles_among_weights_and_statistics_do_not_run(capsys, tmp_path, armed):
    go_through_weights(capsys, tmp_path, armed, ["torch"], (".pth", ".npz"))


@pytest.mark.slow
def test_every_pickle_among_weights_and_statistics_does_not_run(capsys, tmp_path, armed, note):
    tried = go_through_weights(capsys, tmp_path, armed, armed[1])
    note("a planted pickle", "in weights, statistics, autoencoders, text encoders", tried, "never executed: an error")


# -------------------------------------------------------------------------------------- names and archives

OUTSIDE = ("../escaped", "/tmp/scalelong-escaped", "a/../../escaped", "..\\escaped", "C:\\escaped")


def archive(path, name, kind):
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(name, b"x")
    else:
        member = tarfile.TarInfo(name if kind == "tar" else "link")
        if kind != "tar":
            member.type, member.linkname = (tarfile.SYMTYPE if kind == "link" else tarfile.LNKTYPE), name
        with tarfile.open(path, "w") as file:
            file.addfile(member)


def test_archives_and_names_do_not_write_outside(capsys, tmp_path, note):
    before = set(tmp_path.parent.rglob("*escaped*"))
    tried = 0
    for name in OUTSIDE:
        for kind in ("zip", "tar", "link", "hard link"):
            path = tmp_path / f"{tried}.{'zip' if kind == 'zip' else 'tar'}"
            archive(path, name, kind)
            code, err = command_line(capsys, "data", "prepare", path)
            check_error(code, err)
            tried += 1
        for command in (
            ["data", "prepare", name],
            ["data", "prepare", "digits", f"--split={name}"],
            ["data", "info", name],
            [*as_arguments(), f"--data={name}", f"--out={tmp_path / 'run'}", "-q"],
        ):
            code, err = command_line(capsys, *command)
            check_error(code, err)
            tried += 1
    assert set(tmp_path.parent.rglob("*escaped*")) == before
    assert not Path("/tmp/scalelong-escaped").exists()
    assert not [path for path in cache_dir().parent.iterdir() if "escaped" in path.name]
    note(
        "names and archives",
        "../, absolute paths, links, drive letters",
        tried,
        "refused; nothing written outside the cache",
    )


def test_archives_that_would_fill_the_disk_are_refused(capsys, tmp_path, note):
    """Zeros pack a thousand to one: the archive is small, what is in it is not."""
    zeros = bytes(1 << 20)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as file, file.open("a.png", "w") as inner:
        for _ in range(80):
            inner.write(zeros)
    member = tarfile.TarInfo("a.png")
    member.size = 80 << 20
    with tarfile.open(tmp_path / "bomb.tgz", "w:gz", compresslevel=1) as file:
        file.addfile(member, io.BytesIO(zeros * 80))
    before = set(cache_dir().rglob("*"))
    for name in ("bomb.zip", "bomb.tgz"):
        code, err = command_line(capsys, "data", "prepare", tmp_path / name)
        check_error(code, err, "unpacks to more than")
    left = [path for path in set(cache_dir().rglob("*")) - before if path.is_file()]
    assert sum(path.stat().st_size for path in left) < 1 << 20, left
    note(
        "names and archives",
        "archives that unpack to a thousand times their size",
        2,
        "refused; what was unpacked is removed",
    )


def test_a_preset_or_scaling_named_like_a_path_makes_no_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for preset in OUTSIDE:
        code, err = command_line(capsys, "train", preset)
        check_error(code, err, "unknown preset")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ the page


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.attributes, self.texts = [], [], []

    def handle_starttag(self, tag, attributes):
        self.found.append(tag)
        self.attributes += [name for name, _ in attributes]

    def handle_data(self, data):
        self.texts.append(data)


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><svg onload=alert(1)>",
    "{{7*7}}&lt;b&gt;",
)


def test_the_report_shows_hostile_names_as_text(capsys, tmp_path, finished, note):
    plain = Tags()
    shutil.copytree(finished, tmp_path / "plain")
    assert command_line(capsys, "report", tmp_path / "plain")[0] == 0
    plain.feed((tmp_path / "plain" / "report.html").read_text())
    for k, words in enumerate(HOSTILE):
        folder = tmp_path / f"{k}" / words.replace("/", "⁄")
        shutil.copytree(finished, folder)
        record = json.loads((folder / "config.json").read_text())
        record["config"] |= {"preset": words, "tracker": words}
        record["config"]["data"]["name"] = words
        record |= {"device": words, "class_names": [words] * 3, "versions": {words: words}}
        record["data"]["name"] = words
        (folder / "config.json").write_text(json.dumps(record))
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 2, "loss": 0.5, words: 1.0}) + "\n")
        (folder / "evaluation.json").write_text(
            json.dumps({"name": words, "card": {"captions": [words], words: words}})
        )
        code, err = command_line(capsys, "report", folder, f"--out={tmp_path / 'page.html'}")
        assert code == 0, err
        page = Tags()
        text = (tmp_path / "page.html").read_text()
        page.feed(text)
        assert page.found.count("script") == plain.found.count("script")
        assert not [name for name in page.attributes if re.match(r"on[a-z]+$", name)]
        assert set(page.found) <= set(plain.found) | {
            "table",
            "tr",
            "td",
            "th",
            "tbody",
            "thead",
            "dl",
            "dt",
            "dd",
            "p",
        }
    note(
        "the HTML report",
        "hostile run names, data names, metrics, captions, cards",
        len(HOSTILE),
        "shown as text; no injected element or handler in the page",
    )


# -------------------------------------------------------------------------------------------- the source itself


def calls():
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield (
                    path.relative_to(SOURCE),
                    ast.unparse(node.func),
                    {k.arg: ast.unparse(k.value) for k in node.keywords},
                )


def test_no_call_in_the_source_could_run_what_it_reads(note):
    """What would execute a file or hand text to a shell does not occur; torch.load is restricted everywhere."""
    forbidden = {
        "eval",
        "exec",
        "os.system",
        "os.popen",
        "pickle.load",
        "pickle.loads",
        "joblib.load",
        "torch.jit.load",
        "yaml.load",
        "subprocess.getoutput",
        "shelve.open",
        "marshal.loads",
        "np.lib.format.read_array",
    }
    tried = 0
    for path, name, options in calls():
        tried += 1
        if (path.as_posix(), name) == ("evaluation/weights.py", "torch.jit.load"):
            continue  # of one published file, after its hash was checked
        assert name not in forbidden, (path, name)
        assert options.get("shell", "False") == "False", path
        assert options.get("allow_pickle", "False") == "False", path
        assert options.get("trust_remote_code", "False") == "False", path
        if name == "torch.load":
            assert options.get("weights_only") == "True", path
    note("the source", "every call is checked", tried, "none unpickles, evaluates, or gives text to a shell")


def clients_of_another_file(program, *arguments, cwd):
    """A registry that delivers something else under the right name."""
    name = "package.tgz" if program == "npm" else "package-1-py3-none-any.whl"
    (cwd / name).write_bytes(b"PK\x05\x06" + bytes(18))


def test_what_is_fetched_is_compared_with_a_hash_and_not_opened_otherwise(tmp_path, monkeypatch, note):
    """Every package that is fetched at run time, delivered with other contents."""
    from scalelong.data import CATALOG, encoders, registries
    from scalelong.errors import SourceUnavailableError
    from scalelong.evaluation.inception import INCEPTION

    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    monkeypatch.setattr(registries, "run", clients_of_another_file)
    packages = [package for spec in CATALOG.values() for package in spec.packages if package.client != "apt"]
    packages += [INCEPTION.package, encoders.MINILM_PACKAGE]
    for package in packages:
        with pytest.raises(SourceUnavailableError, match=package.digest):
            package.folder()
    left = [path for path in (tmp_path / "downloads").iterdir() if path.suffix != ".lock"]
    assert not left
    note("downloads", "another file under the right name", len(packages), "refused by its hash; nothing was unpacked")


def test_user_text_reaches_no_shell(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "system", lambda *a: pytest.fail("a shell was called"))
    for words in ("$(touch owned)", "`touch owned`", "; touch owned", "| touch owned", "hf:$(touch owned)"):
        command_line(capsys, "data", "prepare", words)
        command_line(capsys, *as_arguments(train__steps=1), f"--data={words}", f"--out={words}", "-q")
    assert not (tmp_path / "owned").exists()
