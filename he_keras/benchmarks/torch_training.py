"""Adversarial training steps in PyTorch, as its users write them: the peers of `training`.

One class, one method for each framework. While attacking, gradients are taken with respect to the
images only. TRADES computes the clean prediction anew at every step of its attack, as the released
code does. HE is written with `torch.nn.functional.normalize`; the margin enters the training loss.
"""

import contextlib
import statistics

import numpy as np
import torch
from torch.nn import functional

from he_keras.benchmarks.torch_twin import PreActResNet

#: What PyTorch's users turn on to be faster; every combination is tried.
VARIANTS = ("eager", "channels-last", "compile", "channels-last+compile")


class TorchTraining:
    """Runs training steps of one framework.

    Args:
        twin: the network in PyTorch.
        cell: the framework and its settings, see `training.Cell`.
        variant: one of `VARIANTS`.
        margin: cosine margin times scale, 0 without HE.
    """

    def __init__(self, twin: PreActResNet, cell, variant: str, margin: float) -> None:
        options = variant.split("+")
        self._format = torch.contiguous_format
        if "channels-last" in options:
            self._format = torch.channels_last
            twin = twin.to(memory_format=torch.channels_last)
        self._network = twin
        self._run = torch.compile(twin) if "compile" in options else twin
        self._cell, self._margin = cell, margin
        self._optimizer = torch.optim.SGD(twin.parameters(), **cell.optimizer)
        self._noise: torch.Tensor | None = None
        self._steps = {
            "pgd_at": self._pgd_at,
            "trades": self._trades,
            "free_at": self._free_at,
            "fast_at": self._fast_at,
        }

    def step(self, images, labels, start) -> float:
        """Trains on one batch and returns the loss; `start` is where the attack begins."""
        return self._steps[self._cell.objective](images, labels, start)

    def tensor(self, images: np.ndarray):
        """Returns images as PyTorch wants them."""
        channels_first = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        return channels_first.contiguous(memory_format=self._format)

    def predict(self, images) -> np.ndarray:
        """Returns the logits in inference mode."""
        self._network.eval()
        with torch.no_grad(), self._precision():
            return self._run(images).float().numpy()

    def _precision(self):
        if self._cell.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def _pgd_at(self, images, labels, start) -> float:
        self._network.eval()

        def attacked(x_adv):
            return functional.cross_entropy(self._run(x_adv), labels, reduction="sum")

        x_adv = self._ascend(images, start, attacked, self._cell.num_steps)
        self._network.train()
        return self._update(lambda: self._training_loss(self._run(x_adv), labels))

    def _trades(self, images, labels, start) -> float:
        self._network.eval()

        def attacked(x_adv):
            return functional.kl_div(
                functional.log_softmax(self._run(x_adv), dim=1),
                functional.softmax(self._run(images), dim=1),
                reduction="sum",
            )

        x_adv = self._ascend(images, start, attacked, self._cell.num_steps)
        self._network.train()

        def loss():
            clean, adversarial = self._run(images), self._run(x_adv)
            divergence = functional.kl_div(
                functional.log_softmax(adversarial, dim=1),
                functional.softmax(clean, dim=1),
                reduction="batchmean",
            )
            return self._training_loss(clean, labels) + self._cell.beta * divergence

        return self._update(loss)

    def _fast_at(self, images, labels, start) -> float:
        self._network.eval()

        def attacked(x_adv):
            return functional.cross_entropy(self._run(x_adv), labels, reduction="sum")

        x_adv = self._ascend(images, start, attacked, 1)
        self._network.train()
        return self._update(lambda: self._training_loss(self._run(x_adv), labels))

    def _free_at(self, images, labels, _start) -> float:
        self._network.train()
        epsilon = self._cell.epsilon
        if self._noise is None:
            self._noise = torch.zeros_like(images)
        losses = []
        for _ in range(self._cell.num_replays):
            noise = self._noise.clone().requires_grad_(True)

            def loss(noise=noise):
                return self._training_loss(self._run((images + noise).clamp(0.0, 1.0)), labels)

            losses.append(self._update(loss))
            step = self._cell.step_size * noise.grad.sign()
            self._noise = (self._noise + step).clamp(-epsilon, epsilon)
        # As the progress bar of `fit` shows it.
        return statistics.fmean(losses)

    def _ascend(self, images, start, loss_of, num_steps: int):
        epsilon, step_size = self._cell.epsilon, self._cell.step_size
        x_adv = start.clone()
        for _ in range(num_steps):
            x_adv.requires_grad_(True)
            with self._precision():
                loss = loss_of(x_adv)
            gradient = torch.autograd.grad(loss, [x_adv])[0]
            x_adv = x_adv.detach() + step_size * gradient.sign()
            x_adv = torch.min(torch.max(x_adv, images - epsilon), images + epsilon)
            x_adv = x_adv.clamp(0.0, 1.0)
        return x_adv

    def _training_loss(self, logits, labels):
        if self._margin:
            margin = functional.one_hot(labels, logits.shape[1]) * self._margin
            logits = logits - margin.to(logits.dtype)
        return functional.cross_entropy(logits, labels)

    def _update(self, loss_function) -> float:
        self._optimizer.zero_grad()
        with self._precision():
            loss = loss_function()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())
