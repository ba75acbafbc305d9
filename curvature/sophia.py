"""Sophia-H: an optimizer that divides its momentum by a running estimate of the Hessian's diagonal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from curvature.whole_graph import named_operations

__all__ = ["Curvature", "SophiaH", "check_loss", "hessian_product", "hutchinson_diagonal", "signs"]

Curvature: TypeAlias = Literal["diagonal", "row-norm"]
"""What divides the momentum."""


class SophiaH(Optimizer):
    """Sophia with Hutchinson's estimate of the Hessian's diagonal.

        m <- beta1 m + (1 - beta1) g                                       every step
        h <- beta2 h + (1 - beta2) d                                       every `interval` steps, by `update_curvature`
        theta <- (1 - lr weight_decay) theta - lr clip(m / max(gamma h, eps), -rho, rho)

    g is the gradient and d an estimate of the Hessian's diagonal at the same parameters, such as `hutchinson_diagonal`
    gives. Where the curvature is small, negative or not known yet the step is lr rho sign(m). Neither average is
    corrected for its start at zero, as in the source.

    d_i = H_ii + sum over j != i of z_i z_j H_ij is mostly noise where weights are many. In the weight matrices of the
    embedded architecture, early in its training, H_ii is a thousandth of the deviation of d_i: half of all h are
    negative, and means of 16 estimates are uncorrelated with means of 16 others. What one estimate tells is the order
    of E[d_i^2] = sum over j of H_ij^2, the squared norm of row i: how fast the gradient changes when weight i moves.
    `curvature="row-norm"` divides by that norm, and settles for a shorter memory (betas of 0.9):

        v <- beta2 v + (1 - beta2) d^2,   h = sqrt(v / (1 - beta2^n))      after n estimates

    (Where d is a mean of k estimates, what lies beside the diagonal counts for 1 / sqrt(k): gamma is to grow as much.)

        optimizer = SophiaH(model.parameters(), lr=4e-4)
        for batch in batches:
            if optimizer.curvature_due:
                optimizer.update_curvature(hutchinson_diagonal(loss_of(batch), optimizer.parameters, seed=step))
            loss_of(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    State: two tensors per parameter, `momentum` and `hessian` (h, or v), in the parameter's dtype. A step takes two
    temporary copies of the parameters.

    Args:
        params: Parameters, or groups of them with settings of their own, apart from `interval`.
        lr: Learning rate; also the largest change of a weight in one step, over rho.
        betas: (beta1, beta2), decay of the momentum and of the curvature.
        gamma: Share of the curvature that divides the momentum: the smaller, the more weights move by lr rho; see
            `bounded_share`. Smaller batches have noisier momentum and want a larger one.
        rho: Bound on the entries of the update, before lr.
        eps: Least divisor, which replaces curvature that is not positive. In float16 it is 6e-5 at least, the smallest
            normal number.
        weight_decay: Decoupled weight decay.
        interval: Steps from one estimate of the curvature to the next; the first is due ahead of the first step.
        curvature: What h is an estimate of: the "diagonal" of the Hessian, as in the source, or the "row-norm". The
            latter is larger, so that fewer weights are at the bound and lr / gamma alone matters.

    Raises:
        ValueError: If a setting is out of range, or the intervals of groups differ.

    Source: Liu, Li, Hall, Liang and Ma, Sophia, ICLR 2024, algorithms 1 and 3. Means of squared estimates: Yao et al.,
    AdaHessian, AAAI 2021, which has no bound.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 4e-4,
        betas: tuple[float, float] = (0.96, 0.99),
        *,
        gamma: float = 0.01,
        rho: float = 1.0,
        eps: float = 1e-12,
        weight_decay: float = 0.1,
        interval: int = 10,
        curvature: Curvature = "diagonal",
    ) -> None:
        if interval < 1:
            raise ValueError(f"interval must be at least 1 step, got {interval}")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "gamma": gamma,
            "rho": rho,
            "eps": eps,
            "weight_decay": weight_decay,
            "interval": interval,
            "curvature": curvature,
            "steps": 0,
            "estimates": 0,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: If a setting of the group is out of range, or its interval another one than the others'.
        """
        super().add_param_group(param_group)
        first, added = self.param_groups[0], self.param_groups[-1]
        try:
            _check(added)
            if added["interval"] != first["interval"]:
                raise ValueError(
                    f"interval must be the same in all groups, since an estimate is of all parameters; got "
                    f"{first['interval']} and {added['interval']}"
                )
        except ValueError:
            self.param_groups.pop()
            raise

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, group after group: the order of `update_curvature`."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def curvature_due(self) -> bool:
        """Whether the coming step is one of those ahead of which the curvature is to be estimated."""
        group = self.param_groups[0]
        return bool(group["steps"] % group["interval"] == 0)

    @torch.no_grad()
    def update_curvature(self, diagonal: Sequence[Tensor | None]) -> None:
        """Take in an estimate of the Hessian's diagonal.

        Args:
            diagonal: One tensor per parameter, of its shape, in the order of `parameters`; None where it is zero.

        Raises:
            ValueError: If their number or a shape does not fit.
            FloatingPointError: If an entry is not finite; nothing is taken in then.
        """
        parameters = self.parameters
        if len(diagonal) != len(parameters):
            raise ValueError(f"diagonal: expected {len(parameters)} tensors, one per parameter, got {len(diagonal)}")
        for number, (p, d) in enumerate(zip(parameters, diagonal, strict=True)):
            if d is not None and d.shape != p.shape:
                raise ValueError(f"diagonal[{number}]: expected shape {tuple(p.shape)}, got {tuple(d.shape)}")
        present = [d for d in diagonal if d is not None]
        if present and not math.isfinite(float(torch.stack(torch._foreach_norm(present)).sum())):
            raise FloatingPointError("diagonal: the estimate of the Hessian's diagonal is not finite")
        remaining = iter(diagonal)
        for group in self.param_groups:
            beta2 = group["betas"][1]
            estimates = [next(remaining) for _ in group["params"]]
            averages = [self._of(p)["hessian"] for p in group["params"]]
            if averages:
                torch._foreach_mul_(averages, beta2)
            known = [(h, d.to(h.dtype)) for h, d in zip(averages, estimates, strict=True) if d is not None]
            if known and group["curvature"] == "diagonal":
                torch._foreach_add_([h for h, _ in known], [d for _, d in known], alpha=1 - beta2)
            elif known:
                found = [d for _, d in known]
                torch._foreach_addcmul_([h for h, _ in known], found, found, value=1 - beta2)
            group["estimates"] += 1

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update from the parameters' gradients; parameters without a gradient stay as they are.

        Args:
            closure: Computes loss and gradients anew, or None.

        Returns:
            What the closure returned.

        Raises:
            NotImplementedError: If a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            if moving:
                self._move(group, moving)
            group["steps"] += 1
        return loss

    @torch.no_grad()
    def bounded_share(self) -> float:
        """Share of the weights whose update is at its bound, with the averages as they are; 0 without any.

        Where it is 1, the optimizer moves by signs alone and its curvature has no say; its authors choose `gamma` such
        that it lies between 0.5 and 0.9 through most of a training run.
        """
        bounded, moving = [], 0
        for group in self.param_groups:
            for p in group["params"]:
                if state := self.state.get(p):
                    (least,) = _divisors(group, [state["hessian"]])
                    bounded.append((state["momentum"].abs() >= least.mul_(group["rho"])).sum())
                    moving += p.numel()
        return float(torch.stack(bounded).sum()) / moving if moving else 0.0

    def _move(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if any(g.is_sparse for g in gradients):
            raise NotImplementedError("SophiaH needs dense gradients; make embeddings with sparse=False")
        momenta = [self._of(p)["momentum"] for p in parameters]
        beta1, lr = group["betas"][0], float(group["lr"])
        torch._foreach_mul_(momenta, beta1)
        torch._foreach_add_(momenta, gradients, alpha=1 - beta1)
        updates = torch._foreach_div(momenta, _divisors(group, [self._of(p)["hessian"] for p in parameters]))
        torch._foreach_clamp_max_(updates, group["rho"])
        torch._foreach_clamp_min_(updates, -group["rho"])
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-lr)

    def _of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["hessian"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _divisors(group: dict[str, Any], averages: list[Tensor]) -> tuple[Tensor, ...]:
    """max(gamma h, eps) of a group's parameters, from the averages that they keep."""
    scale = group["gamma"]
    if group["curvature"] == "row-norm":
        averages = list(torch._foreach_sqrt(averages))
        # Without any estimate the averages are zero, whatever divides them.
        scale /= math.sqrt(1 - group["betas"][1] ** max(group["estimates"], 1))
    divisors = torch._foreach_mul(averages, scale)
    # In float16 the usual eps rounds to zero, and zero momentum over that is NaN.
    torch._foreach_clamp_min_(divisors, [max(group["eps"], torch.finfo(d.dtype).tiny) for d in divisors])
    return divisors


def signs(parameters: Iterable[Tensor], seed: int) -> list[Tensor]:
    """Independent signs, +1 or -1 with equal probability, of the parameters' shapes, dtypes and devices.

    Drawn where the parameters are, so that a probe of a large model takes no time; the same seed gives the same signs
    on devices of one kind. (`curvature.probes` draws the same ones everywhere, and takes longer.)

    Args:
        parameters: The tensors to be like.
        seed: Of the generator.
    """
    generators: dict[torch.device, torch.Generator] = {}
    drawn = []
    for p in parameters:
        if p.device not in generators:
            generators[p.device] = torch.Generator(p.device).manual_seed(seed)
        z = torch.empty_like(p, requires_grad=False).bernoulli_(0.5, generator=generators[p.device])
        drawn.append(z.mul_(2).sub_(1))
    return drawn


def hutchinson_diagonal(loss: Tensor, parameters: Sequence[Tensor], *, seed: int) -> list[Tensor | None]:
    """One sample of the diagonal of a loss's Hessian: d = z * (H z), z of random signs.

    E[d] = diag H, and Var[d_i] = sum over j != i of H_ij^2. Exact product, whole graph: cost of a backward and a second
    backward pass, and the memory of both graphs. Adds nothing to `parameter.grad`.

    Args:
        loss: A scalar with a graph that can be differentiated twice.
        parameters: The parameters.
        seed: Of the signs; see `signs`.

    Returns:
        One tensor per parameter, or None where the product is zero.

    Raises:
        FloatingPointError: If the loss is not finite.
        NotImplementedError: If an operation has no second derivative.

    Source: Hutchinson 1990; Bekas, Kokiopoulou and Saad 2007.
    """
    check_loss(loss)
    directions = signs(parameters, seed)
    products = hessian_product(loss, parameters, directions)
    return [None if hz is None else hz * z for hz, z in zip(products, directions, strict=True)]


def check_loss(loss: Tensor) -> None:
    """Refuse a loss that has no Hessian.

    Raises:
        FloatingPointError: If it is not finite.
    """
    if not bool(torch.isfinite(loss.detach())):
        raise FloatingPointError(f"loss: it is {float(loss.detach())}, which has no Hessian")


def hessian_product(loss: Tensor, parameters: Sequence[Tensor], z: Sequence[Tensor]) -> list[Tensor | None]:
    """H z of a loss, exact, through the whole graph; the graph is freed. Nothing is read by the host.

    Args:
        loss: A scalar with a graph that can be differentiated twice.
        parameters: The parameters.
        z: One tensor per parameter, of its shape and dtype.

    Returns:
        One tensor per parameter, or None where the product is zero.

    Raises:
        NotImplementedError: If an operation has no second derivative.
    """
    with named_operations():
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        graphs = [(g, d) for g, d in zip(gradients, z, strict=True) if g is not None and g.requires_grad]
        if not graphs:
            return [None] * len(parameters)
        return list(torch.autograd.grad([g for g, _ in graphs], parameters, [d for _, d in graphs], allow_unused=True))


def _check(group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    ranges = {
        "lr": (group["lr"] >= 0, "at least 0"),
        "betas[0]": (0 <= beta1 < 1, "in [0, 1)"),
        "betas[1]": (0 <= beta2 < 1, "in [0, 1)"),
        "gamma": (group["gamma"] > 0, "above 0"),
        "rho": (group["rho"] > 0, "above 0"),
        "eps": (group["eps"] > 0, "above 0"),
        "weight_decay": (group["weight_decay"] >= 0, "at least 0"),
        "interval": (group["interval"] >= 1, "at least 1 step"),
    }
    if group["curvature"] not in get_args(Curvature):
        raise ValueError(f"curvature must be one of {', '.join(get_args(Curvature))}, got {group['curvature']!r}")
    values = group | {"betas[0]": beta1, "betas[1]": beta2}
    for name, (fits, rule) in ranges.items():
        if not fits or not math.isfinite(float(values[name])):
            raise ValueError(f"{name} must be finite and {rule}, got {values[name]}")
