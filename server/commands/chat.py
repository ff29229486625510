"""``radixserve chat``: talk to a model in the terminal, or through a pipe, where each line is a message."""

from __future__ import annotations

import contextlib
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from radixserve.server.commands.client import (
    CHAT_PATH,
    CallFailed,
    Client,
    Reply,
    client_parser,
    connected,
    split_serve_options,
)
from radixserve.server.commands.parser import Parser

_HELP = """\
/reset          forget the conversation
/system [TEXT]  set the system prompt, or remove it; forgets the conversation
/stats          tokens and times of the last answer
/help           this list
/quit           leave (Ctrl-D, too)
Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer, the up key brings back what was sent."""


class Chat:
    """Owns one conversation. ``write`` takes text as it comes, ``think`` the reasoning before it."""

    def __init__(self, client: Client, system: str, write: Callable[[str], None], think: Callable[[str], None]) -> None:
        self._client = client
        self._write = write
        self._think = think
        self._reply: Reply | None = None
        self._messages: list[dict[str, str]] = []
        self._reset(system)

    def take(self, line: str) -> bool:
        """Obey a command or answer a message; false when it is time to leave."""
        command, _, argument = line.strip().partition(" ")
        match command:
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/help":
                self._write(_HELP + "\n")
            case "/reset":
                self._reset(self._system)
            case "/system":
                self._reset(argument.strip())
            case "/stats":
                self._write((self._reply.summary() if self._reply else "nothing was answered yet") + "\n")
            case _ if command.startswith("/") and command[1:].isalpha():
                self._write(f"there is no command {command}; /help lists them\n")
            case _:
                self._answer(line)
        return True

    def _reset(self, system: str) -> None:
        self._system = system
        self._messages = [{"role": "system", "content": system}] if system else []

    def _answer(self, text: str) -> None:
        """What came before a Ctrl-C stays in the conversation; a message that failed does not, nor does reasoning."""
        self._messages.append({"role": "user", "content": text})
        reply, answer, thinking = Reply(), "", False
        try:
            for piece in self._client.stream(CHAT_PATH, {"messages": self._messages}, reply):
                if piece.is_reasoning:
                    self._think(_harmless(piece.text))
                    thinking = True
                    continue
                if thinking:
                    self._think("\n\n")
                    thinking = False
                answer += piece.text
                self._write(_harmless(piece.text))
            self._write("\n")
        except KeyboardInterrupt:
            self._write(" (stopped)\n")
        except CallFailed as error:
            self._messages.pop()
            print(f"error: {error}", file=sys.stderr)
            return
        self._reply = reply
        self._messages.append({"role": "assistant", "content": answer})


def build_parser() -> Parser:
    parser = client_parser("chat", "[MODEL]", "Chat with a model. /help there tells the commands.")
    parser.add_argument("positional_model", metavar="MODEL", nargs="?", help="the same as --model")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    return parser


def run(arguments: Sequence[str]) -> int:
    own, serve_options = split_serve_options(arguments)
    flags = build_parser().parse_args(own)
    flags.model = flags.model or flags.positional_model
    with connected(flags, serve_options) as client:
        chat = Chat(client, flags.system, _write, _write_faintly)
        if not sys.stdin.isatty():
            lines: Iterator[str] = (line.rstrip("\n") for line in sys.stdin)
        else:
            print(f"{client.model}. /help lists commands, Ctrl-D leaves.")
            lines = _typed_lines()
        for line in lines:
            if not chat.take(line):
                break
    return 0


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _write_faintly(text: str) -> None:
    """On a terminal only: who reads the answers from a pipe wants those."""
    if sys.stdout.isatty():
        _write(f"\033[2m{text}\033[0m")


def _harmless(text: str) -> str:
    """Without control characters, with which a model could command the terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")


def _typed_lines() -> Iterator[str]:
    session: PromptSession[str] = PromptSession(
        "> ", history=_History(_history_file()), multiline=True, key_bindings=_key_bindings()
    )
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:  # drops the line, as in a shell
            continue
        except EOFError:
            return


class _History(FileHistory):
    """Where it cannot be written (no home, a full disk), it lasts as long as the chat."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _history_file() -> str:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state / "radixserve"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return str(folder / "chat_history")
