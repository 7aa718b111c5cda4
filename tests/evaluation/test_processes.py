"""Two processes: every image is counted exactly once, and every process has the figures of one."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from small_pictures import pictures
from torch import nn

from scalelong.errors import EvaluationError
from scalelong.evaluation import ModuleExtractor, evaluate_images
from scalelong.evaluation.images import ArrayImages, rank_and_world


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
        seen = [index for batch in ArrayImages(array).batches(8, 0, 51) for index in batch.indices.tolist()]
        figures = {name: result.to_dict() for name, result in results.items()}
        torch.save({"results": figures, "seen": seen, "error": str(caught.value)}, folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("two")
    multiprocessing.spawn(evaluate_there, (2, port, folder), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_each_image_falls_to_one_process(two):
    assert sorted(two[0]["seen"] + two[1]["seen"]) == list(range(51))
    assert two[0]["seen"]
    assert two[1]["seen"]


@pytest.mark.parametrize(("way", "n"), [("array", 51), ("stream", 51), ("one batch", 8)])
def test_every_process_has_the_figures_of_one_process(two, way, n):
    alone = evaluate_images(pictures(51)[:n], pictures(60, seed=1, high=200), network())
    for process in two:
        found = process["results"][way]
        assert found["card"]["n"] == n
        assert found["card"]["processes"] == 2
        assert found["card"]["content"] == alone.card.content
        assert found["card"]["reference"]["content"] == alone.card.reference.content
        np.testing.assert_allclose(found["frechet"], alone.frechet, rtol=1e-6)
        np.testing.assert_allclose(found["kid"], alone.kid, rtol=1e-4)


def test_what_goes_wrong_in_one_process_ends_all(two):
    """Otherwise the others would wait for it."""
    assert "9×9" in two[1]["error"]
    assert two[0]["error"] == f"process 1: {two[1]['error']}"


def test_one_process_is_rank_0_of_1():
    assert rank_and_world() == (0, 1)
