from hypothesis import given
from hypothesis import strategies as st

from loraserve.api.inference_call import salted

SALTS = st.tuples(st.text(max_size=8), st.text(max_size=8))


@given(SALTS, SALTS)
def test_no_two_pairs_of_salts_are_one(first: tuple[str, str], second: tuple[str, str]) -> None:
    assert (salted(*first) == salted(*second)) == (first == second)
