"""Where options come from, which place wins, and what mistakes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixserve.configs.schema import ServeConfig
from radixserve.configs.sources import (
    Layer,
    OptionError,
    environment_layer,
    file_layer,
    flag_layer,
    merge,
    preset_layer,
    preset_names,
    to_toml,
)


def toml(folder: Path, text: str) -> Layer:
    path = folder / "radixserve.toml"
    path.write_text(text)
    return file_layer(path)


def test_without_sources_all_options_have_their_defaults() -> None:
    assert merge([]) == ServeConfig()


def test_the_first_layer_wins_and_later_ones_fill_in(tmp_path: Path) -> None:
    config = merge(
        [
            flag_layer({"port": "1"}),
            environment_layer({"RADIXSERVE_PORT": "2", "RADIXSERVE_MAX_NUM_SEQS": "3"}),
            toml(tmp_path, "port = 4\nmax_num_seqs = 5\npage_size = 16"),
        ]
    )
    assert (config.port, config.max_num_seqs, config.page_size) == (1, 3, 16)


def test_text_is_read_as_the_options_type() -> None:
    config = merge([flag_layer({"gpu_memory_utilization": "0.5", "enforce_eager": "yes", "max_model_len": "64"})])
    assert (config.gpu_memory_utilization, config.enforce_eager, config.max_model_len) == (0.5, True, 64)


@pytest.mark.parametrize("given", ["a, b", ["a", "b"], ["a,b"], "a,b,"])
def test_lists_are_comma_separated_or_repeated(given: object) -> None:
    assert merge([flag_layer({"served_model_name": given})]).served_model_name == ("a", "b")


def test_auto_restores_a_default_that_is_found_out_later(tmp_path: Path) -> None:
    assert merge([flag_layer({"page_size": "auto"}), toml(tmp_path, "page_size = 8")]).page_size is None


def test_auto_stays_a_value_where_it_is_one() -> None:
    assert merge([flag_layer({"device": "auto"})]).device == "auto"


def test_keys_may_stand_under_the_table_of_their_group(tmp_path: Path) -> None:
    config = merge([toml(tmp_path, '[model]\nmodel = "m"\n[kv_cache]\npage_size = 4')])
    assert (config.model, config.page_size) == ("m", 4)


def test_an_empty_variable_is_not_set() -> None:
    assert merge([environment_layer({"RADIXSERVE_PORT": ""})]).port == ServeConfig().port


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_are_left_alone() -> None:
    environ = {
        "RADIXSERVE_PORT": "tcp://10.0.0.1:8000",
        "RADIXSERVE_SERVICE_HOST": "10.0.0.1",
        "RADIXSERVE_SERVICE_PORT": "8000",
        "RADIXSERVE_SERVICE_PORT_HTTP": "8000",
        "RADIXSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "RADIXSERVE_WEB_SERVICE_HOST": "10.0.0.2",
        "RADIXSERVE_WEB_PORT": "tcp://10.0.0.2:80",
        "RADIXSERVE_WEB_PORT_80_TCP": "tcp://10.0.0.2:80",
    }
    assert merge([environment_layer(environ)]) == ServeConfig()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (flag_layer({"prot": "1"}), "unknown option --prot; did you mean --port?"),
        (flag_layer({"zzzzzz": "1"}), "unknown option --zzzzzz"),
        (
            environment_layer({"RADIXSERVE_PAGESIZE": "1"}),
            "unknown option RADIXSERVE_PAGESIZE; did you mean RADIXSERVE_PAGE_SIZE?",
        ),
        (flag_layer({"port": "http"}), "--port: 'http' is not allowed, it should be a valid integer"),
        (
            environment_layer({"RADIXSERVE_PAGE_SIZE": "65"}),
            "RADIXSERVE_PAGE_SIZE: '65' is not allowed, it should be less than or equal to 64",
        ),
        (
            flag_layer({"watchdog_timeout": "inf"}),
            "--watchdog-timeout: 'inf' is not allowed, it should be a finite number",
        ),
        (
            flag_layer({"watchdog_timeout": "1.9"}),
            "--watchdog-timeout: '1.9' is not allowed, it should be greater than or equal to 2",
        ),
        (
            flag_layer({"health_timeout": "301"}),
            "watchdog_timeout 300 is less than health_timeout 301: engines that /health calls well would be ended; "
            "raise --watchdog-timeout or lower --health-timeout",
        ),
        (
            flag_layer({"cors_allow_origins": "https://a.example,https://b.example/"}),
            "--cors-allow-origins: 'https://b.example/' is not allowed, it should be an origin such as "
            "https://chat.example.org:8443, with nothing behind it, or *",
        ),
        (flag_layer({"device": "gpu"}), "--device: 'gpu' is not allowed, it should be 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_place_and_what_is_allowed(layer: Layer, message: str) -> None:
    with pytest.raises(OptionError) as error:
        merge([layer])
    assert str(error.value) == message


def test_several_wrong_values_are_told_at_once() -> None:
    with pytest.raises(OptionError) as error:
        merge([flag_layer({"port": "x", "seed": "y"})])
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == ["--port", "--seed"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "unknown option key prot in FILE; did you mean key port in FILE?"),
        ("[sever]\nport = 1", "unknown table [sever] in FILE; did you mean [server]?"),
        ("[model]\nport = 1", "key port in FILE belongs to table [server], not [model]"),
        ("port = 1\n[server]\nport = 2", "key port in FILE is given twice"),
        ("page_size = 0", "key page_size in FILE: 0 is not allowed, it should be greater than or equal to 1"),
        (
            "port 1",
            "config file FILE is not valid TOML: Expected '=' after a key in a key/value pair (at line 1, column 6)",
        ),
    ],
)
def test_a_mistake_in_a_file_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        merge([toml(tmp_path, text)])
    assert str(error.value).replace(str(tmp_path / "radixserve.toml"), "FILE") == message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cannot read config file .*nowhere.toml: No such file"):
        file_layer(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_is_valid_and_changes_something(preset: str) -> None:
    assert merge([preset_layer(preset)]) != ServeConfig()


def test_an_unknown_preset_is_told_with_those_there_are() -> None:
    with pytest.raises(OptionError) as error:
        preset_layer("latencies")
    assert (
        str(error.value)
        == "unknown preset 'latencies'; did you mean latency?; there are cpu-small, latency, throughput"
    )


def test_printed_options_read_back_as_the_same(tmp_path: Path) -> None:
    config = ServeConfig(
        model='a "b" \\ ü\x7f', served_model_name=("x", "y"), page_size=4, drain_timeout=0.5, dtype="float16"
    )
    assert merge([toml(tmp_path, to_toml(config))]) == config


@pytest.mark.parametrize("option", ["api_key", "admin_api_key"])
def test_api_keys_show_nowhere_but_to_our_own_processes(option: str, tmp_path: Path) -> None:
    config = ServeConfig.model_validate({option: ["k-secret"]})
    for text in (repr(config), str(config), repr(config.model_dump()), config.model_dump_json(), to_toml(config)):
        assert "k-secret" not in text
    assert ServeConfig.model_validate_json(config.to_private_json()) == config
    assert getattr(config, option)[0].get_secret_value() == "k-secret"
    assert merge([toml(tmp_path, to_toml(config))]) == ServeConfig(), "a mask was read back as a key"
    with pytest.raises(OptionError, match=f"key {option} in .*: this is not allowed") as error:
        merge([toml(tmp_path, f'{option} = [["k-secret"]]')])
    assert "k-secret" not in str(error.value)


@pytest.mark.parametrize("option", ["api_key", "admin_api_key"])
def test_a_key_that_is_empty_does_not_open_the_server(option: str, tmp_path: Path) -> None:
    for layer in (flag_layer({option: [""]}), environment_layer({f"RADIXSERVE_{option.upper()}": " "})):
        with pytest.raises(OptionError, match="has no key in it"):
            merge([layer])
    with pytest.raises(OptionError, match=f"key {option} in .* has no key in it"):
        merge([toml(tmp_path, f'{option} = ""')])
    assert merge([toml(tmp_path, f"{option} = []")]) == ServeConfig()


def test_so_many_threads_that_nothing_else_could_start_are_refused() -> None:
    with pytest.raises(OptionError, match="--cpu-threads: '100000' is not allowed.*1024"):
        merge([flag_layer({"cpu_threads": "100000"})])
