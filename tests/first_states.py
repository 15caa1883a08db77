"""Return models and data pipelines to their first state: making one takes longer than training."""

from tfdist.backup import state


def repeatable(model):
    """Return a function that returns a model in its first state, so that it is traced once.

    Args:
        model: Built and compiled model, in whose scope this is called.
    """
    model.optimizer.build(model.trainable_variables)
    first = state.of_model(model)

    def fresh():
        state.into_model(first, model, "first")
        return model

    return fresh


def rewound(pipeline):
    """Return a data pipeline as a process begins with it.

    The number of the next epoch is all that a pass leaves in it.
    """
    pipeline.epochs.next = 0
    return pipeline
