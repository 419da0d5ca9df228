"""Multiplexed models in a replica: loaded for a query's id, told to routers, unloaded."""

from greenroom import serve
from tests.support.timing import until


class Many:
    def __init__(self):
        self.loaded, self.unloaded = [], []

    @serve.multiplexed(max_num_models_per_replica=2)
    async def model(self, model_id):
        self.loaded.append(model_id)
        unloaded = self.unloaded

        class Loaded:
            async def __del__(self):
                unloaded.append(model_id)

        return Loaded()

    async def __call__(self):
        model_id = serve.get_multiplexed_model_id()
        assert serve.get_request_context().multiplexed_model_id == model_id
        await self.model(model_id)
        return model_id


def test_models_are_loaded_once_routers_know_of_them_and_all_are_unloaded_at_the_end(one_process):
    one = one_process(Many)
    many, replica = one.user_code.servable.instance, one.proxy.dispatcher.router.state.replicas

    async def ask():
        for model_id in ("a", "b", "b", "grün"):
            answer = one.handle.options(multiplexed_model_id=model_id).remote()
            assert await answer == model_id
        await until(lambda: set(replica["r1"].models) == {"b", "grün"})

    one.run(ask())
    assert (many.loaded, many.unloaded) == (["a", "b", "grün"], ["a"])
    one.finalize()
    assert sorted(many.unloaded) == ["a", "b", "grün"]
