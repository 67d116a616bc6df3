"""How good pictures are: Fréchet inception distance and CLIP score, from the features of pictures, as torchmetrics
defines them. Nothing here knows where features come from.
"""
import torch
from torchmetrics.image.fid import FrechetInceptionDistance

FEWEST_SAMPLES = 10_000  # with fewer, FID is biased upwards by much


class GivenFeatures(torch.nn.Module):
    """Stands for the network of FrechetInceptionDistance where its features are at hand.

    Args:
        num_features: of each picture.
    """

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = num_features

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features


def frechet_distance(drawn: torch.Tensor, real: torch.Tensor) -> float:
    """The distance of two sets of features, (N, D) and (M, D), as torchmetrics' FrechetInceptionDistance has it.

    It calculates in float64. At the 2048 features of InceptionV3 that takes a minute on a CPU. Raises ValueError if a
    feature is not finite.
    """
    require_finite('a feature of --inception', drawn, real)
    drawn, real = in_their_span(drawn.double(), real.double())
    metric = FrechetInceptionDistance(feature=GivenFeatures(real.shape[1]))
    metric.update(real, real=True)
    metric.update(drawn, real=False)
    return max(0.0, metric.compute().item())  # of two equal sets rounding leaves a little on either side of 0


def in_their_span(drawn: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sets, (N, D) and (M, D), in an orthonormal basis of the space that they span, where that is smaller.

    Distances there are the same, so that a few pictures take a moment instead of a minute.
    """
    if len(drawn) + len(real) >= real.shape[1]:
        return drawn, real
    both = torch.cat([drawn, real]) - real.mean(dim=0)
    basis, _ = torch.linalg.qr(both.T)  # (D, N + M)
    return (both @ basis).split([len(drawn), len(real)])


def clip_score(cosines: torch.Tensor) -> float:
    """The CLIP score, 0 to 100, of pictures whose embeddings have these cosines, (N,), with those of their captions.

    As in torchmetrics' CLIPScore, it is the mean that does not fall below 0, not each picture. Raises ValueError if one
    is not finite.
    """
    require_finite('an embedding of --clip', cosines)
    return max(0.0, 100 * cosines.double().mean().item())


def require_finite(what: str, *tensors: torch.Tensor) -> None:
    """Raises ValueError if a number is not finite, of which nothing follows."""
    for tensor in tensors:
        if not tensor.isfinite().all():
            raise ValueError(f'{what} is not finite; its weights, or those of the model that draws, are damaged')
