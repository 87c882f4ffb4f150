"""What a take is told of a gateway."""

from jaxrl.pool.curves import Curves


def test_a_gateway_that_was_started_again_counts_from_nothing():
    """What it counted since is what is told, also of what it counted more often than before."""
    curves = Curves()
    each = [{"cut": cut, "own_s": 2.0 * cut, "limit": 8} for cut in (3, 5, 1, 7)]
    told = [curves.gateway(one) for one in each]
    assert [one["gateway_cut"] for one in told] == [3.0, 2.0, 1.0, 6.0]
    assert [one["gateway_s"] for one in told] == [6.0, 4.0, 2.0, 12.0]
    assert {one["gateway_limit"] for one in told} == {8.0}
    assert curves.gateway({}) == {}
    again = curves.gateway({"cut": 9, "own_s": 0.5})
    assert (again["gateway_cut"], again["gateway_s"]) == (9.0, 0.5)
    permits = {"spool_bytes": 70, "waited_spool_bytes": 2}
    assert curves.gateway(permits) == {
        "gateway_spool_bytes": 70.0,
        "gateway_waited_spool_bytes": 2.0,
    }
    told = curves.gateway(permits | {"waited_spool_bytes": 5})
    assert told["gateway_waited_spool_bytes"] == 3.0
    curves.gateway(each[-1])
    assert curves.gateway(each[-1] | {"cut": 8})["gateway_cut"] == 1.0
