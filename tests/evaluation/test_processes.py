"""Several processes: every image counts once, and every process gets the values that one process gets."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from small_pictures import pictures
from torch import nn

from scalelong.errors import EvaluationError
from scalelong.evaluation import ModuleExtractor, build_extractor, dataset_reference, evaluate_images
from scalelong.evaluation import images as images_module
from scalelong.evaluation import reference as reference_module
from scalelong.evaluation.images import ArrayImages, StreamImages, rank_and_world
from scalelong.evaluation.memorisation import measure_memorisation


@pytest.mark.parametrize("world", [2, 3])
def test_shares_of_all_processes_are_the_whole_set(monkeypatch, world):
    """Without processes: each rank reads its batches of an array, and its part of a stream."""
    array, seen = pictures(51), []
    for rank in range(world):
        monkeypatch.setattr(images_module, "rank_and_world", lambda rank=rank: (rank, world))
        seen.append([k for _, indices in ArrayImages(array).batches(8, 3, 51) for k in indices.tolist()])
        own = shares(array, world, rank)
        stream = [k for _, indices in StreamImages(iter([own])).batches(8, 0, 51) for k in indices.tolist()]
        assert stream == list(range(rank, 51, world))
    assert all(seen)
    assert sorted(index for indices in seen for index in indices) == list(range(3, 51))


def test_memorisation_reads_all_images_in_the_process_that_measures_it(monkeypatch):
    images = pictures(30), pictures(40, seed=1), pictures(30, seed=2)
    images[0][:10] = images[1][5:15]
    alone = measure_memorisation(*images, network(), batch_size=8)
    monkeypatch.setattr(images_module, "rank_and_world", lambda: (0, 2))
    assert measure_memorisation(*images, network(), batch_size=8) == alone
    assert (alone.n, alone.n_training, alone.n_held_out) == (30, 40, 30)


def network():
    torch.manual_seed(0)
    return ModuleExtractor(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), "small")


def shares(array, world, rank):
    """A sampler's share: ⌈n / world⌉ or one fewer images, contiguous."""
    sizes = [len(range(other, len(array), world)) for other in range(world)]
    start = sum(sizes[:rank])
    return array[start : start + sizes[rank]]


def evaluate_there(rank, world, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        array, other = pictures(51), pictures(60, seed=1, high=200)
        mine = shares(array, world, rank)
        results = {
            "array": evaluate_images(array, other, network(), batch_size=8),
            "stream": evaluate_images(iter([mine[:10], mine[10:]]), other, network(), n=51),
            "one batch": evaluate_images(array[:8], other, network(), batch_size=8),  # the second process has none
        }
        mixed = iter([array[:4], pictures(4, size=9)]) if rank else iter([array[:4]])
        with pytest.raises(EvaluationError) as caught:
            evaluate_images(mixed, other, network())
        cached = references_of_two_machines(folder / f"cache-{rank}", rank)
        seen = [index for _, indices in ArrayImages(array).batches(8, 0, 51) for index in indices.tolist()]
        figures = {name: result.to_dict() for name, result in results.items()}
        torch.save({"results": figures, "seen": seen, "error": str(caught.value), **cached}, folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def references_of_two_machines(cache, rank):
    """Twice the same statistics, with a cache per process, of which only one has them the second time."""
    os.environ |= {"SCALELONG_CACHE": str(cache), "LOCAL_RANK": str(rank)}
    first, second = (dataset_reference("digits", "validation", build_extractor("pixels"), 40) for _ in range(2))
    os.environ["LOCAL_RANK"] = "0"  # now as if every process had a machine of its own
    dataset_reference("digits", "validation", build_extractor("pixels"), 40)
    equal = torch.allclose(first.features.moments.mean, second.features.moments.mean, rtol=0, atol=1e-12)
    return {"equal": equal, "cached": len(list(cache.rglob("first-40.safetensors")))}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("two")
    multiprocessing.spawn(evaluate_there, (2, port, folder), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
def test_each_image_falls_to_one_process(two):
    assert sorted(two[0]["seen"] + two[1]["seen"]) == list(range(51))
    assert two[0]["seen"]
    assert two[1]["seen"]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "n"), [("array", 51), ("stream", 51), ("one batch", 8)])
def test_every_process_has_the_values_of_one_process(two, way, n):
    alone = evaluate_images(pictures(51)[:n], pictures(60, seed=1, high=200), network())
    for process in two:
        result = process["results"][way]
        assert result["card"]["n"] == n
        assert result["card"]["processes"] == 2
        assert result["card"]["content"] == alone.card.content
        assert result["card"]["reference"]["content"] == alone.card.reference.content
        np.testing.assert_allclose(result["frechet"], alone.frechet, rtol=1e-6)
        np.testing.assert_allclose(result["kid"], alone.kid, rtol=1e-4)


@pytest.mark.slow
def test_an_error_in_one_process_is_raised_in_all(two):
    """Otherwise the others would wait for it."""
    assert "9×9" in two[1]["error"]
    assert two[0]["error"] == f"process 1: {two[1]['error']}"


@pytest.mark.slow
def test_a_file_that_one_machine_lacks_is_computed_by_all_and_written_on_each(two):
    """Otherwise the processes that have it would go on, and the others wait for them."""
    assert [process["equal"] for process in two] == [True, True]
    assert [process["cached"] for process in two] == [1, 1]


@pytest.mark.parametrize(("others", "used"), [([True, True], True), ([True, False], False)])
def test_a_cached_file_is_used_only_if_every_process_has_it(monkeypatch, tmp_path, others, used):
    def gather(everyone, own):
        assert own
        everyone[:] = others

    monkeypatch.setattr(reference_module, "rank_and_world", lambda: (0, 2))
    monkeypatch.setattr(reference_module.dist, "all_gather_object", gather)
    (tmp_path / "file").touch()
    assert reference_module._all_have(tmp_path / "file") is used


def test_one_process_is_rank_0_of_1():
    assert rank_and_world() == (0, 1)
