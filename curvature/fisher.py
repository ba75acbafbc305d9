"""The Fisher information of a language model, sampled from the model or taken at the labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from torch import Tensor, nn

from curvature.ggn import OutputCurvatureOperator
from curvature.loss import Batch, Loss
from curvature.model_operator import Method
from curvature.streaming import Streaming
from curvature.token_curvature import ScoreCurvature, TokenCurvature, sampled_labels

__all__ = ["FisherKind", "FisherOperator"]

FisherKind: TypeAlias = Literal["monte-carlo", "empirical"]


class FisherOperator(OutputCurvatureOperator):
    """Fisher information of the model's next-token distribution, from outer products of gradients of single tokens.

        F = 1 / tokens * sum_t mean_s g_ts g_ts^T,   g_ts = d l_t(y_ts) / d theta = J_t^T (p_t - e(y_ts))

    - "monte-carlo": y_ts ~ p_t, `samples` labels drawn from the model for each token. Its expectation over the draws is
      the Fisher information, which for the cross-entropy is the Gauss-Newton matrix (`GGNOperator` gives it without a
      draw). For a given seed the operator is one fixed matrix: the same labels in every product, batch by batch,
      whatever the method and the restriction.
    - "empirical": y_t is the label. That is the second moment of the tokens' gradients, not a Fisher information away
      from a perfect fit; it depends on the labels.

    Gradients are those of single tokens' losses, not of sequences. See `OutputCurvatureOperator` for the other
    arguments, cost and errors.

    Args:
        model: A causal language model.
        batches: Batches as Hugging Face collators make them.
        kind: "monte-carlo" or "empirical".
        samples: Labels drawn per token ("monte-carlo" only).
        seed: Seed of the draws ("monte-carlo" only), 0 <= seed < 2**64.
        loss: A token-wise loss; for "monte-carlo" it must be the negative log-likelihood under softmax(logits).
        params: See `ModelOperator`.
        method: "streamed", "whole" or "auto".
        streaming: Settings of the streamed method.

    Raises:
        ValueError: If `kind`, `samples` or `seed` is out of range.

    Source: Kunstner, Hennig and Balles, Limitations of the empirical Fisher approximation (2019).
    """

    kind: ClassVar[str] = "fisher"

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Batch],
        *,
        kind: FisherKind = "monte-carlo",
        samples: int = 1,
        seed: int = 0,
        loss: Loss | None = None,
        params: str | Iterable[str] | None = None,
        method: Method = "auto",
        streaming: Streaming | None = None,
    ) -> None:
        if kind not in get_args(FisherKind):
            raise ValueError(f"kind must be one of {', '.join(get_args(FisherKind))}, got {kind!r}")
        if samples < 1:
            raise ValueError(f"samples must be at least 1 label per token, got {samples}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {seed}")
        self.fisher_kind, self.samples, self.seed = kind, samples, seed
        self._labels: dict[int, Callable[[Tensor, int], Tensor]] = {}
        super().__init__(model, batches, loss=loss, params=params, method=method, streaming=streaming)

    def _token_curvature(self, number: int) -> TokenCurvature:
        if number not in self._labels:
            self._labels[number] = self._make_labels(number)
        return ScoreCurvature(self._handed.token_sum, self._labels[number])

    def _make_labels(self, number: int) -> Callable[[Tensor, int], Tensor]:
        targets = self._handed.targets(self.batches[number])
        if self.fisher_kind == "empirical":
            return lambda logits, start: targets[None, :, start : start + logits.shape[1]]
        return sampled_labels(targets, self._handed.ignore_index, samples=self.samples, seed=self.seed, number=number)

    def identity(self) -> dict[str, Any]:
        """See `LinearOperator.identity`."""
        return {**super().identity(), "kind": self.fisher_kind, "samples": self.samples, "seed": self.seed}
