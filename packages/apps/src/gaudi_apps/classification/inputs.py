"""What a classifier learns from and is scored on."""

from __future__ import annotations

from gaudi_apps.application import Batches, TrainingData
from gaudi_apps.classification.facts import note_classes
from gaudi_apps.classification.recipe import IMAGENET_CLASSES, IMAGENET_TRAIN_IMAGES, Recipe
from gaudi_apps.encoded_images import keep_if_it_fits
from gaudi_datasets.errors import DataError
from gaudi_datasets.sampling import InputOptions

# What imports TensorFlow is imported inside the functions: it must have been started by then.


def input_options(recipe: Recipe, *, image_size: int | None = None) -> InputOptions:
    """How the pipelines batch in this process; the size of the images is the recipe's unless it is given."""
    data, device, place = recipe.data, recipe.run.device, recipe.run.distribution.place
    return InputOptions(
        batch_size=data.batch_size,
        image_size=image_size or data.image_size,
        seed=device.seed,
        rank=place.rank,
        size=place.size,
        parallel_calls=data.parallel_calls,
        threads=data.threads or device.usable_cpus,
        flip_probability=data.flip_probability,
        dtype=data.dtype,
    )


def open_training_data(recipe: Recipe) -> TrainingData:
    """Open what the recipe names.

    Raises:
        MissingInputError: it is not there.
        DataError: it is damaged.
    """
    return _open_images(recipe) if recipe.data.data_dir else _open_fake(recipe)


def _open_images(recipe: Recipe) -> TrainingData:
    from gaudi_apps.classification.decoded_images import DecodedSource
    from gaudi_apps.classification.sources import open_source
    from gaudi_datasets.classification.augmentation import CropRange
    from gaudi_datasets.classification.colors import ColorRange
    from gaudi_datasets.classification.pipeline import train_dataset
    from gaudi_datasets.tf_input import read_batches

    source, options = open_source(recipe.data.data_dir, recipe.data.train_splits), input_options(recipe)
    if recipe.data.caches_encoded:
        options = keep_if_it_fits(source, options, recipe.run.distribution.place.local_size)
    if len(source.class_names) < 2:
        raise DataError(f"{source.name}: has the class {source.class_names[0]} only; a classifier needs two or more")
    if recipe.data.caches_decoded:
        source = DecodedSource(source)
    crops = CropRange(min_area=recipe.data.least_area)
    colors = ColorRange(recipe.data.color_jitter, recipe.data.gray_probability)

    def batches(first_step: int) -> Batches:
        dataset = train_dataset(source, options, first_step=first_step, crop_range=crops, color_range=colors)
        return read_batches(dataset, source)

    return TrainingData(note_classes(source.class_names), len(source), source.fingerprint, batches)


def _open_fake(recipe: Recipe) -> TrainingData:
    from gaudi_datasets.classification.pipeline import fake_dataset

    def batches(first_step: int) -> Batches:
        return iter(fake_dataset(input_options(recipe), num_classes=IMAGENET_CLASSES))

    names = [str(number) for number in range(1, IMAGENET_CLASSES + 1)]
    return TrainingData(note_classes(names), IMAGENET_TRAIN_IMAGES, "random images", batches)
