from itertools import product

import numpy as np
from loraserve_kernels.sampling_noise import splitmix64, uniform


def test_splitmix64_matches_the_published_sequence():
    assert [splitmix64(1234567, index) for index in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_any_python_integer_is_a_seed():
    values = [uniform(seed, 0) for seed in (-1, 2**64 - 1, 2**80, 0)]

    assert values[0] == values[1]
    assert values[2] == values[3]


def test_noise_is_uniform_over_neighboring_seeds_and_positions():
    values = np.array([uniform(seed, position) for seed, position in product(range(200), repeat=2)])

    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 99 + 4 * np.sqrt(2 * 99)
    grid = values.reshape(200, 200)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
