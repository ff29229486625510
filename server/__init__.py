"""The frontend: HTTP in front of the engine. Loads no torch. The way of a request:

    connection.py, middleware.py    from bytes to a call: limits, its id, its key, the whole body
    routes/common.py                the models in protocol/ check the body
    routes/generate.py              a function for each path; the prompt (prompts.py), sampling, and what the answer
                                    must look like (output/plan.py)
    generation.py                   one engine request for each choice, through engine_client.py and engine_socket.py
    open_requests.py, choice.py     what the engine says becomes text; output/parser.py finds reasoning and tool calls
    generation.py again             the stream, of frames that the answers in protocol/ write; else one JSON

``app.py`` puts that together, ``frontend.py`` owns its state, ``supervisor.py``, ``worker.py`` and ``serving.py`` are
the processes, ``cli.py`` and ``commands/`` the command line.
"""
