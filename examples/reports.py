"""Jobs that outlive their connections: see docs/jobs.md."""

from greenroom import serve


@serve.deployment(num_replicas=2)
@serve.task_consumer(task_processor_config=serve.TaskProcessorConfig(max_retries=5))
class Reports:
    @serve.task_handler
    def make(self, year: int) -> dict[str, int]:
        return {"year": year}


app = Reports.bind()
