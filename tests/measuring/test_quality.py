"""FID and CLIP score are what the formula says, what scipy says, and what torchmetrics' own classes say."""
import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torchmetrics.image.fid import FrechetInceptionDistance

from measuring.quality import clip_score, frechet_distance


def features(number: int, width: int, seed: int) -> torch.Tensor:
    """Correlated ones, float32 (number, width)."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator)
    return torch.randn(number, width, generator=generator) @ mixing + torch.randn(width, generator=generator)


def by_scipy(drawn: torch.Tensor, real: torch.Tensor) -> float:
    means = [np.mean(each.double().numpy(), axis=0) for each in (drawn, real)]
    covariances = [np.cov(each.double().numpy(), rowvar=False) for each in (drawn, real)]
    root = sqrtm(covariances[0] @ covariances[1]).real
    return float(np.sum((means[0] - means[1]) ** 2) + np.trace(covariances[0] + covariances[1] - 2 * root))


def of_few(drawn: torch.Tensor, real: torch.Tensor) -> float:
    """The same of fewer pictures than features: the trace of the root is the sum of the singular values of what the
    centred sets make with each other, of which no side is longer than there are pictures.
    """
    drawn, real = drawn.double().numpy(), real.double().numpy()
    centred = [each - each.mean(axis=0) for each in (drawn, real)]
    centred = [each / np.sqrt(len(each) - 1) for each in centred]
    singular_values = np.linalg.svd(centred[0] @ centred[1].T, compute_uv=False)
    traces = sum(np.square(each).sum() for each in centred)
    return float(np.square(drawn.mean(axis=0) - real.mean(axis=0)).sum() + traces - 2 * singular_values.sum())


def test_the_distance_is_that_of_scipys_root():
    drawn, real = features(500, 24, 1), features(400, 24, 2)
    assert frechet_distance(drawn, real) == pytest.approx(by_scipy(drawn, real), rel=1e-6)


@pytest.mark.parametrize('number', [2, 20])
def test_the_distance_of_fewer_pictures_than_features_is_that_of_all_their_features(number):
    drawn, real = features(number, 64, 1), features(15, 64, 2)
    assert frechet_distance(drawn, real) == pytest.approx(of_few(drawn, real), rel=1e-6)


def test_the_distance_is_that_of_torchmetrics_for_the_pictures_themselves():
    class Network(torch.nn.Module):
        num_features = 12

        def forward(self, pictures):
            return pictures.float().reshape(len(pictures), -1)[:, :12]

    generator = torch.Generator().manual_seed(0)
    drawn, real = (torch.randint(low, 256, (40, 3, 8, 8), dtype=torch.uint8, generator=generator) for low in (0, 90))
    metric = FrechetInceptionDistance(feature=Network())
    metric.update(real, real=True)
    metric.update(drawn, real=False)
    assert frechet_distance(Network()(drawn), Network()(real)) == pytest.approx(metric.compute().item(), rel=1e-6)


def test_a_set_has_no_distance_from_itself_and_a_moved_and_stretched_one_what_the_formula_says():
    real = features(300, 24, 1)
    variance = torch.cov(real.double().T).trace().item()
    assert frechet_distance(real, real) == pytest.approx(0, abs=1e-6 * variance)
    move = torch.linspace(-1, 2, 24)
    assert frechet_distance(real + move, real) == pytest.approx(move.square().sum().item(), rel=1e-4)
    stretched = 3 * (real - real.mean(0)) + real.mean(0)
    assert frechet_distance(stretched, real) == pytest.approx((3 - 1) ** 2 * variance, rel=1e-4)


def test_the_score_is_the_mean_and_only_that_does_not_fall_below_zero():
    assert clip_score(torch.tensor([0.3, -0.1])) == pytest.approx(10)
    assert clip_score(torch.tensor([-0.3, 0.1])) == 0


@pytest.mark.parametrize('wrong', [float('nan'), float('inf')])
def test_of_what_is_not_finite_there_is_no_score(wrong):
    real = features(30, 8, 1)
    drawn = real.clone()
    drawn[3, 2] = wrong
    for call in (lambda: frechet_distance(drawn, real), lambda: frechet_distance(real, drawn),
                 lambda: clip_score(drawn[:, 2])):
        with pytest.raises(ValueError, match='not finite'):
            call()
