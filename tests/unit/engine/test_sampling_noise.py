import numpy as np

from loraserve.engine.sampling_noise import splitmix64, uniforms


def test_splitmix64_matches_the_published_sequence():
    state = np.full(5, 1234567, dtype=np.uint64)

    outputs = splitmix64(state, np.arange(5, dtype=np.uint64))

    assert outputs.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_noise_depends_on_seed_and_position_only():
    together = uniforms([3, 4, 3], [10, 10, 11])

    assert together.tolist() == [uniforms([s], [p])[0] for s, p in ((3, 10), (4, 10), (3, 11))]
    assert len(set(together.tolist())) == 3


def test_any_python_integer_is_a_seed():
    values = uniforms([-1, 2**64 - 1, 2**80, 0], [0, 0, 0, 0])

    assert values[0] == values[1]
    assert values[2] == values[3]


def test_noise_is_uniform_over_neighbouring_seeds_and_positions():
    seeds, positions = (axis.ravel().tolist() for axis in np.mgrid[:200, :200])
    values = uniforms(seeds, positions)

    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 99 + 4 * np.sqrt(2 * 99)
    grid = values.reshape(200, 200)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
