"""A worker without model and checkpoints: steps of one all-reduce under a recovery arm, with faults by plan.

The plan is ``plan.json`` in the run's folder: a list of {step, rank, type, always}. Without ``always`` a fault fires
once a run and is announced as a planned one. Steps go on from the newest one in ``saved.json``, which logical rank 0
writes after each step.
"""

import ctypes
import json
import os
import signal
import sys
import time
from datetime import timedelta


def preload(config):
    from payload import recovery

    recovery.preload(config)


class Job:
    def __init__(self, environment, events):
        self.config = environment.config
        self.environment = environment
        self.events = events
        self.stop = False
        self.stopped = False
        self.plan = json.loads((self.config.run_dir / "plan.json").read_text())

    def saved(self):
        path = self.config.run_dir / "saved.json"
        return json.loads(path.read_text()) if path.exists() else 0

    def fault(self, step, rank):
        for number, fault in enumerate(self.plan):
            if (fault["step"], fault["rank"]) != (step, rank):
                continue
            marker = self.config.run_dir / f"fired-{number}"
            if not fault.get("always"):
                if marker.exists():
                    continue
                marker.touch()
            if not fault.get("always"):
                self.events.emit("fault", step=step, type=fault["type"], rank=rank, generation=self.generation)
            self.fire(fault["type"])

    def fire(self, kind):
        if kind == "exception":
            raise RuntimeError("injected")
        if kind == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            while True:
                time.sleep(0.05)
        if kind == "wait":
            self.events.emit("waiting")
            time.sleep(3600)
        if kind == "hang-c":
            ctypes.CDLL(None).sleep(3600)
        if kind == "leave":
            os._exit(int(os.environ["TINY_CODE"]))

    def train(self, attempt):
        import torch
        import torch.distributed as dist

        self.events.emit("attempt", generation=attempt.generation, world_size=attempt.world_size, rank=attempt.rank)
        self.generation = attempt.generation
        aborted = self.config.run_dir / "aborted"
        attempt.on_abort(lambda: aborted.write_text(attempt.generation))
        with attempt.wait("joining"):
            dist.init_process_group(
                "gloo",
                store=attempt.store,
                rank=attempt.rank,
                world_size=attempt.world_size,
                timeout=timedelta(seconds=self.config.timeouts.process_group_s),
            )
        self.events.emit("group_ready", generation=attempt.generation)
        start = torch.tensor([float(self.saved())])
        dist.broadcast(start, 0)
        block_s = float(os.environ.get("TINY_BLOCK_S", "0"))
        if block_s and not self.saved():
            with attempt.wait("a long C call"):
                ctypes.CDLL(None).usleep(int(block_s * 1e6))
        for step in range(int(start.item()) + 1, self.config.training.max_steps + 1):
            attempt.ping()
            self.fault(step, attempt.rank)
            packet = torch.tensor([1.0, float(self.stop)])
            dist.all_reduce(packet)
            assert packet[0].item() == attempt.world_size
            if attempt.rank == 0:
                draft = self.config.run_dir / "saved.draft"
                draft.write_text(json.dumps(step))
                draft.replace(self.config.run_dir / "saved.json")
            self.events.emit("step", step=step, duration_s=0.0, generation=attempt.generation)
            if packet[1].item():
                self.stopped = True
                self.events.emit("stopping", step=step)
                break
            time.sleep(self.config.training.min_step_s)
        dist.barrier()
        dist.destroy_process_group()


def main():
    from payload import process, recovery
    from payload.config import EXIT_STOPPED
    from payload.environment import WorkerEnvironment
    from payload.events import EventLog

    environment = WorkerEnvironment.read()
    events = EventLog(environment.config.events_dir / f"rank{environment.rank}.jsonl", f"rank{environment.rank}")
    started = time.time() if environment.warm else process.started_wall(os.getpid())
    events.emit("process_start", started_wall=started, warm=environment.warm, cycle=environment.cycle)
    job = Job(environment, events)
    signal.signal(signal.SIGTERM, lambda *_: setattr(job, "stop", True))
    code = 1
    try:
        recovery.build(environment.config, environment, events).run(job.train)
        code = EXIT_STOPPED if job.stopped else 0
    except SystemExit as error:
        code = error.code
    except RuntimeError as error:
        print(f"rank {environment.rank}: {error!r}", file=sys.stderr)
    finally:
        events.emit("process_end", code=code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
