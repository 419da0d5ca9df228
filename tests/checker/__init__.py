"""An outside checker: real systems under faults, and a judge that knows nothing of their code.

Clients in processes of their own change endpoints and send requests, and write down what they asked
for, when, and what they were answered (:mod:`.histories`). Replicas write down what they run. In
the meantime processes are killed and stopped, and hosts cut off, frozen and crashed
(:mod:`.faults`). Afterwards :mod:`.judge` says what of it no correct system could have done, by
:mod:`.linearizability` among others. These three modules import nothing of the product.

``python -m tests.checker --minutes 10 --seed 1`` is a long run; :mod:`.test_runs` has short ones,
and shows that three defects, planted by :mod:`.defects`, are caught.
"""
