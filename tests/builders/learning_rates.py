"""The learning rate that an optimizer uses at a step, asked for as a training would see it."""


def rate_at(optimizer, step):
    optimizer.iterations.assign(step)
    return float(optimizer.learning_rate)


def stored_schedule(optimizer):
    """The schedule as the optimizer's configuration stores it."""
    return optimizer.get_config()["learning_rate"]
