"""Image folders: classes, captions, splits, and every way a folder can be wrong."""

from __future__ import annotations

import gc
import json
import os
import shutil
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import picture
from PIL import Image

from scalelong.data import ImageData, load
from scalelong.errors import DataError, InvalidValueError, ScaleLongError, UnknownNameError


def fails(match: str, folder: Path, **options: object) -> str:
    """Load a folder, expect a one-line error that matches, and return it."""
    with pytest.raises(ScaleLongError, match=match) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_subfolders_are_classes_in_alphabetical_order(class_folder: Path):
    data = load(class_folder)
    assert data.class_names == ("cat", "dog")
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    expected = [np.asarray(picture(seed)) for seed in (0, 1, 2, 10, 11, 12)]
    assert np.array_equal(data.images, expected)


def test_a_flat_folder_has_no_classes(flat_folder: Path):
    data = load(flat_folder)
    assert len(data) == 4
    assert data.class_names is None


def test_other_and_hidden_files_are_ignored(class_folder: Path):
    (class_folder / "cat" / "Thumbs.db").write_bytes(b"x")
    (class_folder / "cat" / "._0.png").write_bytes(b"x")
    (class_folder / ".git").mkdir()
    (class_folder / ".git" / "a.png").write_bytes(b"x")
    data = load(class_folder)
    assert len(data) == 6
    assert data.manifest["ignored_files"] == 1


def test_an_empty_folder_is_an_error_with_the_supported_files(tmp_path: Path):
    (tmp_path / "none").mkdir()
    assert str(tmp_path / "none") in fails(r"\.png", tmp_path / "none")


def test_images_beside_and_inside_subfolders_are_rejected(class_folder: Path):
    picture(5).save(class_folder / "loose.png")
    fails(r"loose\.png.*cat/0\.png", class_folder)


def test_mixed_sizes_are_an_error_with_the_file_and_the_remedy(flat_folder: Path):
    picture(9, (16, 16)).save(flat_folder / "3.png")
    fails(r"^3\.png .*16×16×3.*8×8×3.*--image-size", flat_folder)
    data = load(flat_folder, image_size=4)
    expected = picture(9, (16, 16)).resize((4, 4), Image.Resampling.LANCZOS)
    assert np.array_equal(data.images[3], np.asarray(expected))


def test_an_image_that_is_not_square_needs_an_image_size(flat_folder: Path):
    picture(9, (16, 8)).save(flat_folder / "0.png")
    fails(r"^0\.png .*16×8.*--image-size", flat_folder)
    assert load(flat_folder, image_size=8).images.shape == (4, 8, 8, 3)


def test_skip_bad_lists_the_files_and_keeps_the_most_common_size(flat_folder: Path):
    picture(9, (16, 16)).save(flat_folder / "00.png")  # the first by name, but the odd one out
    (flat_folder / "1.png").write_bytes(b"")
    (flat_folder / "2.png").write_bytes(b"nonsense")
    os.mkfifo(flat_folder / "pipe.png")
    data = load(flat_folder, skip_bad=True)
    assert np.array_equal(data.images, [np.asarray(picture(0)), np.asarray(picture(3))])
    names, reasons = zip(*data.manifest["skipped"], strict=True)
    assert names == ("00.png", "1.png", "2.png", "pipe.png")
    assert "16×16" in reasons[0]
    assert all(reasons)


def test_a_set_prepared_with_skip_bad_is_not_opened_without_it(flat_folder: Path):
    (flat_folder / "1.png").write_bytes(b"")
    load(flat_folder, skip_bad=True)
    fails(r"1\.png.*--skip-bad", flat_folder)


def test_only_bad_files_are_an_error_even_with_skip_bad(tmp_path: Path):
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"")
    fails(r"a\.png", folder, skip_bad=True)


def test_a_circular_link_does_not_hang(class_folder: Path):
    (class_folder / "cat" / "again").symlink_to(class_folder, target_is_directory=True)
    assert load(class_folder).class_names == ("cat", "dog")


def test_linked_class_folders_are_followed(tmp_path: Path, class_folder: Path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("cat", "dog"):
        (linked / name).symlink_to(class_folder / name, target_is_directory=True)
    assert len(load(linked)) == 6


class TestCaptions:
    def test_beside_each_image(self, flat_folder: Path):
        for index in range(4):
            (flat_folder / f"{index}.txt").write_text(f"  picture\tnumber {index} \n")
        data = load(flat_folder)
        assert list(data.captions) == [f"picture number {index}" for index in range(4)]

    def test_several_lines_are_several_captions(self, flat_folder: Path):
        for index in range(4):
            (flat_folder / f"{index}.txt").write_text("one\n\ntwo\nthree" if index == 1 else "only")
        captions = load(flat_folder).captions
        assert captions[1] == "one"
        assert captions.of(1) == ["one", "two", "three"]
        assert sum(len(captions.of(image)) for image in range(len(captions))) == 6
        assert captions[-1] == "only"
        with pytest.raises(IndexError):
            captions[4]

    def test_a_missing_one_is_an_error_with_the_image(self, flat_folder: Path):
        (flat_folder / "0.txt").write_text("a caption")
        fails(r"^1\.png .*1\.txt", flat_folder)
        data = load(flat_folder, skip_bad=True)
        assert list(data.captions) == ["a caption"]
        assert len(data.manifest["skipped"]) == 3

    def test_an_empty_one_is_missing(self, flat_folder: Path):
        for index in range(4):
            (flat_folder / f"{index}.txt").write_text(" \n" if index == 2 else "caption")
        fails(r"^2\.png ", flat_folder)

    @pytest.mark.parametrize("character", ["\x00", "\x1b", "\x0c", "\x1c", "\x7f", "\x85"])
    def test_control_characters_are_rejected(self, flat_folder: Path, character: str):
        for index in range(4):
            (flat_folder / f"{index}.txt").write_text(f"a{character}b" if index == 2 else "caption")
        fails(rf"^2\.png .*U\+{ord(character):04X}", flat_folder)

    def test_other_encodings_are_rejected(self, flat_folder: Path):
        for index in range(4):
            (flat_folder / f"{index}.txt").write_bytes("Käse".encode("latin-1" if index == 3 else "utf-8-sig"))
        fails(r"^3\.png .*UTF-8.*3\.txt", flat_folder)
        (flat_folder / "3.txt").write_text("Käse", encoding="utf-8")
        assert set(load(flat_folder).captions) == {"Käse"}

    def test_one_that_is_too_long_is_rejected(self, flat_folder: Path):
        for index in range(4):
            (flat_folder / f"{index}.txt").write_text("x" * 20_000 if index == 0 else "caption")
        fails(r"^0\.png .*20,000", flat_folder)

    @settings(max_examples=40, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
    def test_any_text_is_kept_or_rejected(self, tmp_path_factory: pytest.TempPathFactory, text: str):
        folder = tmp_path_factory.mktemp("any")
        picture(0).save(folder / "a.png")
        (folder / "a.txt").write_bytes(text.encode())
        control = any(unicodedata.category(c) == "Cc" and c not in "\t\n\r" for c in text)
        if control or not text.replace("\ufeff", "", 1).split():
            fails(r"^a\.png ", folder)
        else:
            captions = load(folder).captions.of(0)
            assert " ".join(captions) == " ".join(text.removeprefix("\ufeff").split())


class TestMetadata:
    def write(self, folder: Path, *rows: object) -> None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / "metadata.jsonl").write_text("\n".join(lines))

    def test_captions_and_named_labels(self, flat_folder: Path):
        names = ["red", "blue", "red", "green"]
        self.write(
            flat_folder,
            *({"file_name": f"{i}.png", "text": f"number {i}", "label": names[i]} for i in range(4)),
        )
        data = load(flat_folder)
        assert data.class_names == ("blue", "green", "red")
        assert [data.class_names[label] for label in data.labels] == names
        assert data.captions[2] == "number 2"

    def test_captions_with_classes_by_folder(self, class_folder: Path):
        names = [f"{name}/{i}.png" for name in ("cat", "dog") for i in range(3)]
        self.write(class_folder, *({"file_name": name, "captions": [name, "other"]} for name in names))
        data = load(class_folder)
        assert data.class_names == ("cat", "dog")
        assert data.captions.of(4) == ["dog/1.png", "other"]

    def test_numbered_labels_count_up_to_the_largest(self, flat_folder: Path):
        self.write(flat_folder, *({"file_name": f"{i}.png", "label": i % 3} for i in range(4)))
        assert load(flat_folder).labels.tolist() == [0, 1, 2, 0]

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (["{broken"], r"metadata\.jsonl line 1"),
            (["[1]"], r"line 1 .*file_name"),
            ([{"text": "x"}], r"line 1 .*file_name"),
            ([], r"metadata\.jsonl"),
            ([{"file_name": "../outside.png", "text": "x"}], r"line 1.*'\.\./outside\.png'"),
            ([{"file_name": "/etc/passwd", "text": "x"}], r"line 1.*'/etc/passwd'"),
            ([{"file_name": "9.png", "text": "x"}], r"^9\.png "),
            ([{"file_name": "0.png", "text": "x"}], r"^1\.png .*caption"),
            ([{"file_name": "0.png", "text": 7}, {"file_name": "1.png", "text": "x"}], r"^0\.png .*caption"),
            ([{"file_name": "0.png", "text": [7]}], r"^0\.png .*int"),
            ([{"file_name": "0.png", "label": -3}], r"^0\.png .*-3"),
            ([{"file_name": "0.png", "label": 1}], r"^1\.png .*label"),
            ([{"file_name": "0.png", "label": 1.5}], r"labels.*float"),
            ([{"file_name": "0.png", "label": 1}, {"file_name": "1.png", "label": "a"}], r"labels.*int and str"),
            ([{"file_name": "0.png", "label": 10**9}], r"labels.*1000000000"),
        ],
    )
    def test_errors_contain_the_file_or_line_and_the_value(self, flat_folder: Path, rows: list[object], message: str):
        self.write(flat_folder, *rows)
        fails(message, flat_folder)


class TestMetadataCsv:
    """Rows, labels and captions are those of Hugging Face's `imagefolder`, whose reader is run beside ours."""

    @staticmethod
    def imagefolder(folder: Path, split: str = "train") -> dict[str, list[object]]:
        datasets = pytest.importorskip("datasets")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = datasets.load_dataset(
                "imagefolder", data_dir=str(folder), split=split, cache_dir=str(folder.parent / "hf")
            ).cast_column("image", datasets.Image(decode=False))
            columns = {name: list(rows[name]) for name in rows.column_names}
            del rows
            gc.collect()  # the library leaves metadata.csv open
        return columns

    def test_text_and_integer_labels_are_those_of_imagefolder(self, flat_folder: Path):
        text = 'file_name,text,label\n0.png,"a cat, asleep",1\n1.png,a dog,0\n2.png,eins,2\n3.png,"zwei\n Zeilen",1\n'
        (flat_folder / "metadata.csv").write_text(text, encoding="utf-8")
        data, rows = load(flat_folder), self.imagefolder(flat_folder)
        assert [data.captions[k] for k in range(4)] == [" ".join(text.split()) for text in rows["text"]]
        assert data.labels.tolist() == rows["label"]
        assert data.class_names == ("0", "1", "2")

    def test_file_names_are_relative_to_their_table_and_folders_are_not_classes(self, tmp_path: Path):
        for folder in ("a", "b"):
            (tmp_path / "set" / "train" / folder).mkdir(parents=True)
            picture(len(folder)).save(tmp_path / "set" / "train" / folder / "0.png")
            table = f"file_name,text,label\n0.png,in {folder},only\n"
            (tmp_path / "set" / "train" / folder / "metadata.csv").write_text(table)
        data, rows = load(tmp_path / "set"), self.imagefolder(tmp_path / "set")
        assert sorted(data.captions[k] for k in range(2)) == sorted(rows["text"]) == ["in a", "in b"]
        assert data.class_names == ("only",)

    def test_a_table_beside_the_splits_describes_all_of_them(self, tmp_path: Path):
        for k, split in enumerate(("train", "validation")):
            (tmp_path / "set" / split).mkdir(parents=True)
            picture(k).save(tmp_path / "set" / split / "x.png")
        table = "file_name,text,label\ntrain/x.png,first,zebra\nvalidation/x.png,second,ant\n"
        (tmp_path / "set" / "metadata.csv").write_text(table)
        train, validation = load(tmp_path / "set"), load(tmp_path / "set", "validation")
        assert (train.captions[0], validation.captions[0]) == ("first", "second")
        assert train.class_names == validation.class_names == ("ant", "zebra")
        assert (train.labels.tolist(), validation.labels.tolist()) == ([1], [0])

    def test_other_columns_are_chosen_by_name(self, flat_folder: Path):
        rows = "\n".join(f"{k}.png,prompt {k},{'ab'[k % 2]}" for k in range(4))
        (flat_folder / "metadata.csv").write_text("\ufefffile_name,prompt,breed\n" + rows)
        data = load(flat_folder, caption_column="prompt", label_column="breed")
        assert (data.captions[3], data.class_names) == ("prompt 3", ("a", "b"))
        plain = load(flat_folder)
        assert plain.captions is None
        assert plain.class_names is None
        fails(r"'promt'; did you mean 'prompt'", flat_folder, caption_column="promt")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", r"metadata\.csv is empty"),
            ("name,text\n0.png,x\n", r"line 2 .*file_name"),
            ("file_name,text\n0.png,x,y\n", r"line 2 .*more values"),
            ("file_name,text\n9.png,x\n", r"^9\.png "),
            ("file_name,text\n../0.png,x\n", r"line 2.*'\.\./0\.png'"),
            ("file_name,text\n0.png,x\n1.png,\n2.png,y\n3.png,z\n", r"^1\.png .*caption"),
            ("file_name,label\n0.png,a\n1.png,\n2.png,b\n3.png,b\n", r"^1\.png .*label"),
            ('file_name,text\n0.png,"open', r"metadata\.csv"),
        ],
    )
    def test_errors_contain_the_file_or_line(self, flat_folder: Path, text: str, message: str):
        (flat_folder / "metadata.csv").write_text(text)
        fails(message, flat_folder)

    def test_a_table_in_another_encoding_or_two_tables_are_errors(self, flat_folder: Path):
        (flat_folder / "metadata.csv").write_bytes("file_name,text\n0.png,ü\n".encode("latin-1"))
        fails(r"metadata\.csv.*UTF-8", flat_folder)
        (flat_folder / "metadata.jsonl").write_text("{}")
        fails(r"metadata\.jsonl and metadata\.csv", flat_folder)


class TestWrappers:
    """A folder around everything is not a class."""

    @pytest.mark.parametrize("inside", ["photos", "a/b c/photos"])
    def test_classes_are_those_of_the_folder_inside(self, tmp_path: Path, class_folder: Path, inside: str):
        shutil.copytree(class_folder, tmp_path / "outer" / inside)
        (tmp_path / "outer" / "README.md").write_text("hello")
        wrapped, plain = load(tmp_path / "outer"), load(class_folder)
        assert wrapped.class_names == ("cat", "dog")
        assert wrapped.fingerprint == plain.fingerprint

    def test_images_in_one_folder_have_no_classes(self, tmp_path: Path, flat_folder: Path):
        shutil.copytree(flat_folder, tmp_path / "outer" / "photos")
        assert load(tmp_path / "outer").class_names is None

    def test_splits_and_classes_are_found_inside(self, tmp_path: Path, class_folder: Path):
        for split in ("train", "val"):
            shutil.copytree(class_folder, tmp_path / "outer" / "set" / split / "images")
        shutil.rmtree(tmp_path / "outer" / "set" / "val" / "images" / "cat")
        train, validation = load(tmp_path / "outer"), load(tmp_path / "outer", "validation")
        assert train.class_names == validation.class_names == ("cat", "dog")
        assert validation.labels.tolist() == [1, 1, 1]

    def test_a_folder_that_links_to_itself_ends(self, tmp_path: Path):
        (tmp_path / "loop").mkdir()
        (tmp_path / "loop" / "again").symlink_to(tmp_path / "loop")
        fails("no images", tmp_path / "loop")

    @pytest.mark.parametrize("kind", ["zip", "gztar"])
    @pytest.mark.parametrize("classes", [True, False])
    def test_an_archive_of_a_folder_is_the_folder(
        self, tmp_path: Path, class_folder: Path, flat_folder: Path, kind: str, classes: bool
    ):
        folder = class_folder if classes else flat_folder
        archive = shutil.make_archive(str(tmp_path / "set"), kind, folder.parent, folder.name)
        assert load(archive).fingerprint == load(folder).fingerprint


class TestSplits:
    @pytest.fixture
    def split_folder(self, tmp_path: Path) -> Path:
        for seed, place in enumerate(("train/cat", "train/dog", "val/cat", "val/dog", "test/dog")):
            (tmp_path / "set" / place).mkdir(parents=True)
            picture(seed).save(tmp_path / "set" / place / "a.png")
        return tmp_path / "set"

    def test_are_folders_by_their_usual_names(self, split_folder: Path):
        assert [len(load(split_folder, split)) for split in ("train", "validation", "val", "test")] == [2, 2, 2, 1]

    def test_unknown_ones_list_the_available(self, split_folder: Path):
        fails(
            r"'tset'; did you mean 'test'\? .*test, train, validation",
            split_folder,
            split="tset",
        )

    @pytest.mark.parametrize("split", ["../../etc", "a/b", "", "."])
    def test_a_name_cannot_lead_out_of_the_cache(self, flat_folder: Path, cache: Path, split: str):
        fails("split", flat_folder, split=split)
        assert not any(path.is_dir() for path in cache.rglob("*") if path.name not in ("data",))

    def test_validation_needs_a_folder_or_a_holdout(self, flat_folder: Path):
        fails(r"'validation'.*--holdout", flat_folder, split="validation")

    def test_a_holdout_splits_the_images_once_and_for_all(self, tmp_path: Path):
        folder = tmp_path / "many"
        folder.mkdir()
        for index in range(60):
            picture(index, (2, 2)).save(folder / f"{index}.png")
        train, validation = (load(folder, split, holdout=0.25) for split in ("train", "validation"))

        def pictures(data: ImageData) -> set[bytes]:
            return {image.tobytes() for image in data.images}

        assert pictures(train).isdisjoint(pictures(validation))
        assert len(train) + len(validation) == 60
        assert 5 <= len(validation) <= 25  # binomial(60, 0.25): beyond 3 standard deviations
        (folder / "0.png").rename(tmp_path / "gone.png")
        kept = load(folder, "validation", holdout=0.25)
        assert pictures(kept) <= pictures(validation)

    def test_a_holdout_of_a_train_folder_leaves_its_images_out_of_train(self, tmp_path: Path):
        folder = tmp_path / "set"
        (folder / "train").mkdir(parents=True)
        for index in range(40):
            picture(index, (2, 2)).save(folder / "train" / f"{index}.png")
        sizes = [len(load(folder, split, holdout=0.3)) for split in ("train", "validation")]
        assert sum(sizes) == 40
        assert min(sizes) > 0


def test_a_changed_folder_is_prepared_again(flat_folder: Path):
    before = load(flat_folder)
    picture(99).save(flat_folder / "0.png")
    os.utime(flat_folder / "0.png", ns=(1, 1))
    after = load(flat_folder)
    assert after.folder != before.folder
    assert np.array_equal(after.images[0], np.asarray(picture(99)))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("no/such/folder", DataError, "no/such/folder"),
        ("digit", UnknownNameError, "'digit'; did you mean 'digits'"),
        ("", InvalidValueError, "got ''"),
        ("a\0b", InvalidValueError, "got 'a"),
        ("x" * 5000, DataError, "xxx"),
        ("hf:", InvalidValueError, "got 'hf:'"),
        ("hf:../../etc/passwd", DataError, "owner/name"),
        ("hf:a;rm -rf b", DataError, "owner/name"),
    ],
)
def test_a_name_that_is_not_a_dataset_is_an_error(name: str, error: type[ScaleLongError], message: str):
    with pytest.raises(error, match=message):
        load(name)


def test_a_file_of_another_kind_is_rejected(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("hello")
    fails(r"notes\.txt.*\.npz", tmp_path / "notes.txt")


@settings(max_examples=40, deadline=None)
@given(
    files=st.dictionaries(
        st.sampled_from(["a.png", "b.jpg", "c.gif", "d/e.png", "d/f.webp", "a.txt", "metadata.jsonl", "train/x.png"]),
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from(["RGB", "L", "RGBA", "CMYK"]),
            st.just('{"file_name": "a.png", "text": "\\u0007"}'),
        ),
        min_size=1,
    ),
    skip_bad=st.booleans(),
)
def test_any_folder_is_data_or_a_one_line_error(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes | str], skip_bad: bool
):
    folder = tmp_path_factory.mktemp("any")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, str) and len(content) <= 4:
            picture(0, mode=content).save(path, "TIFF")  # whatever the name says
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    try:
        data = load(folder, skip_bad=skip_bad)
    except ScaleLongError as error:
        message = str(error)
    else:
        message = f"{data}"
        assert data.images.shape[1:] == (8, 8, 3)
    assert "\n" not in message


def test_runs_and_comparisons_inside_the_folder_are_not_data(class_folder: Path):
    before = load(class_folder)
    run, comparison = class_folder / "runs" / "none-seed0", class_folder / "runs" / "compare"
    for folder, files in ((run, ("config.json", "metrics.jsonl")), (comparison, ("comparison.json",))):
        (folder / "samples").mkdir(parents=True)
        picture(5).save(folder / "samples" / "real.png")
        for name in files:
            (folder / name).write_text("{}")
    after = load(class_folder)
    assert (after.class_names, len(after), after.fingerprint) == (before.class_names, len(before), before.fingerprint)


def test_folders_beside_those_of_splits_do_not_make_them_classes(tmp_path: Path):
    for name in ("train", "val", "__MACOSX", "runs"):
        (tmp_path / "set" / name).mkdir(parents=True)
    for k, name in enumerate(("train/a.png", "train/b.png", "val/c.png")):
        picture(k).save(tmp_path / "set" / name)
    (tmp_path / "set" / "__MACOSX" / "._a.png").write_bytes(b"x")
    assert [len(load(tmp_path / "set", split)) for split in ("train", "validation")] == [2, 1]
    assert load(tmp_path / "set").class_names is None
