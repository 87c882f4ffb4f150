"""Rows of prompts and the seats at them, on the host."""

import numpy as np

from jaxrl.model.seats import Layout, Seats, layouts

FORM = Layout(slots=6, rows=3, seats=2, places=8, piece=4)
PROMPT = (1, 2, 3, 4, 5, 6)


def test_a_group_needs_few_rows_and_what_goes_alone_one_for_each_slot():
    groups, alone = layouts(64, 8, 200, 128)
    assert (groups.rows, groups.seats, groups.places) == (12, 8, 256)
    assert (alone.rows, alone.seats) == (64, 8)
    assert [one.rows for one in layouts(4, 8, 8, 128)] == [2, 4]


def test_samples_of_a_prompt_share_its_row_and_a_full_one_is_copied():
    seats = Seats(FORM)
    assert [seats.sit(PROMPT) for _ in range(2)] == [(5, 0), (4, 0)]
    assert seats.pieces == [(0, 0), (0, 4)] and seats.ends(0, 4) and not seats.ends(0, 0)
    np.testing.assert_array_equal(seats.tokens(0, 4), [5, 6])
    assert seats.sit(PROMPT) is None  # it waits until it can be copied
    seats.done()
    assert seats.sit(PROMPT) == (3, 1)
    assert seats.copies == [(0, 1)] and not seats.pieces
    np.testing.assert_array_equal(seats.slots, [[5, 4], [3, 0], [0, 0]])
    assert seats.seat == {5: 0, 4: 1, 3: 2}


def test_a_later_prompt_goes_on_from_whole_pieces_in_place_or_in_a_copy():
    seats = Seats(FORM)
    seats.sit(PROMPT)
    seats.done()
    seats.sit((1, 2, 3, 4, 9))
    assert seats.copies == [(0, 1)] and seats.pieces == [(1, 4)]
    seats.done()
    seats.leave(5)
    longer = (*PROMPT[:4], 7, 7, 7, 7)
    assert seats.sit(longer) == (5, 0)  # nobody sits at its row: no copy
    assert not seats.copies and seats.pieces == [(0, 4)] and not seats.holds(PROMPT)
    seats.done()
    seats.leave(5)
    seats.sit(longer[:4])  # all of it is there, but for the state after its last token
    assert not seats.copies and seats.pieces == [(2, 0)]


def test_rows_that_are_taken_keep_a_prompt_waiting_and_the_oldest_is_given_up():
    seats = Seats(FORM)
    slots = [seats.sit((number,)) for number in range(3)]
    assert seats.sit((7,)) is None and seats.sit((1,)) is not None
    seats.done()
    for slot in [place[0] for place in slots if place is not None][::-1]:
        seats.leave(slot)
    assert seats.sit((7,)) == (5, 0) and not seats.holds((0,))
    assert seats.holds((2,)) and seats.holds((1,))
