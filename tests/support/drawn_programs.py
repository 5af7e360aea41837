"""Programs as hypothesis draws them; the fuzzer, which draws its own, needs none."""

from hypothesis import Phase
from hypothesis import strategies as st

from tests.support.programs import WEIGHTED, Instruction, Program

# The phase that explains a failure line by line takes longer than all the others.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)

_NUMBERS = st.integers(0, 11)
_LINES = st.builds(Instruction, st.sampled_from(WEIGHTED), _NUMBERS, _NUMBERS)

programs: st.SearchStrategy[Program] = st.builds(
    Program,
    # Lists are drawn short by default; half of the programs are to be long.
    st.lists(_LINES, min_size=3, max_size=20).map(tuple)
    | st.lists(_LINES, min_size=18, max_size=45).map(tuple),
    st.lists(
        st.lists(_NUMBERS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3
    ).map(tuple),
    st.booleans(),
)
