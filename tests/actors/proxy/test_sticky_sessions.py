"""Sticky sessions by cookie: which answers set one."""


async def served(_request):
    return "served"


def test_an_answer_makes_its_replica_the_home_of_its_session_once(one_process):
    by_cookie = {"cookie": "chat", "max_age_s": 60}
    config = {"session_affinity": by_cookie}
    one = one_process(served, config=config, **config)

    def cookies(*headers):
        answer = one.run(one.http(headers=headers))
        return [value for name, value in answer.headers if name == b"set-cookie"]

    (cookie,) = cookies()
    assert cookie.endswith(b"; Path=/; HttpOnly; SameSite=Lax; Max-Age=60")
    session, _, home = cookie.partition(b";")[0].rpartition(b".")
    assert home == b"r1"
    assert cookies((b"cookie", b"%s.r1" % session)) == []
    (moved,) = cookies((b"cookie", b"%s.r2" % session))
    assert moved.startswith(b"%s.r1;" % session), "the same session"
