"""Train ResNet-34 on ImageNet, or on any images in its layout.

    export IMAGENET=/data/imagenet
    tfdist train --config=imagenet_resnet34
    tfdist launch --workers 2 -- tfdist train --config=imagenet_resnet34:modern

$IMAGENET, or --config.data.data_dir, is a directory as Kaggle packs it (LOC_train_solution.csv,
LOC_val_solution.csv, LOC_synset_mapping.txt, ILSVRC/Data/CLS-LOC), or one with the directories
train and val, which have a directory for each class. `imagenet_resnet34:modern` is the recipe by
which residual networks are trained today. docs/imagenet.md describes both.
"""

import os

import tfdist

PLAIN = "plain"
MODERN = "modern"


def get_config(recipe=PLAIN):
    if recipe not in (PLAIN, MODERN):
        raise ValueError(f"expected the recipe {PLAIN} or {MODERN}, received {recipe!r}")
    config = tfdist.config.default()
    config.name = "imagenet_resnet34"  # logs, backup and model go to runs/imagenet_resnet34

    config.data.name = f"{__file__}:examples"
    config.data.data_dir = os.environ.get("IMAGENET", "imagenet")
    config.data.global_batch = 256  # of all replicas together
    config.data.image_size = 224  # in evaluation, 7/8 of an image around its centre
    config.data.augment = True  # a random part, from 8 % of the image on, flipped half of the time
    config.data.ignore_errors = 100  # unreadable files, of 1.28 million

    config.model.name = "resnet34"  # or "resnet50"
    config.train.metrics = "accuracy, sparse_top_k_categorical_accuracy"
    config.train.metric_options = {"sparse_top_k_categorical_accuracy": {"k": 5, "name": "top5"}}
    config.train.optimizer = "sgd"
    config.train.optimizer_options = {"momentum": 0.9}
    config.train.epochs = 90
    config.output.export = True
    config.telemetry.images = 16

    if recipe == PLAIN:
        config.train.learning_rate = 0.01
        config.train.schedule = "steps"
        config.train.schedule_options = {"epochs": (30, 60, 80), "factor": 0.1}
        return config

    config.train.optimizer_options.nesterov = True
    config.train.learning_rate = 0.1  # for 256 images a step; other batches get a share of it
    config.train.base_global_batch = 256
    config.train.warmup_epochs = 5.0
    config.train.schedule = "cosine"
    # Keras takes this share of the weights themselves. In a loss, momentum would make it tenfold.
    config.train.weight_decay = 5e-4
    config.train.loss = f"{__file__}:smoothed"
    config.train.loss_options = {"smoothing": 0.1}
    config.train.ema = 0.9999
    config.train.precision = "mixed_bfloat16"
    config.data.augment_options = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4}
    return config


def examples(section, split):
    """Return the images of a split and their classes, in either of the layouts."""
    root = section.data_dir
    part = "train" if split == "train" else "val"
    # The transform to image_size decodes only the part of a file that it needs.
    if os.path.isfile(os.path.join(root, f"LOC_{part}_solution.csv")):
        return tfdist.data.imagenet(root, part, decode=False)
    return tfdist.data.image_folder(os.path.join(root, part), decode=False)


def smoothed(y_true, y_pred, smoothing):
    """Return the cross-entropy with smoothed labels (Szegedy et al. 2015, arXiv 1512.00567)."""
    import keras

    classes = y_pred.shape[-1]
    one_hot = keras.ops.one_hot(keras.ops.reshape(y_true, [-1]), classes)
    return keras.losses.categorical_crossentropy(one_hot, y_pred, label_smoothing=smoothing)
