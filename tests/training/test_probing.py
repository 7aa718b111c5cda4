"""The labelled images of a run's splits, as a probe reads and caches them."""

from scalelong.training.examples import Examples
from scalelong.training.probing import ProbedSplits
from tiny_runs import tiny_config


class Latents:
    """Latents of an autoencoder: the images with another fingerprint."""

    def __init__(self, images, fingerprint):
        self.images, self.batch, self.fingerprint = images, images.batch, fingerprint

    def __len__(self):
        return len(self.images)


def test_cached_features_belong_to_the_autoencoders_weights_not_to_its_name():
    config, keys = tiny_config(data__vae=None), []
    for fingerprint in ("first weights", "other weights, same folder"):
        train, test = (Examples(config, split) for split in (config.data.split, config.data.validation))
        train.source, test.source = (Latents(one.images, f"{fingerprint} {one.images.split}") for one in (train, test))
        splits = ProbedSplits(config, train, test, n=4)
        keys += [splits.train.key, splits.test.key]
    assert len(set(keys)) == 4
