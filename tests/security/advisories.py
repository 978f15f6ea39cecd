"""Security advisories for similar engines and chat servers, and the tests that show that the project is not affected.

`AdvisoryClass.tests`: "file::test", relative to tests/. `not_ours`: why a class does not apply to the project.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdvisoryClass:
    """Advisories of one kind."""

    what: str
    ids: tuple[str, ...]
    tests: tuple[str, ...] = ()
    not_ours: str = ""


def _cves(text: str) -> tuple[str, ...]:
    """Spell out "2025-1 -2 2024-3" as CVE-2025-1, CVE-2025-2, CVE-2024-3."""
    found: list[str] = []
    year = ""
    for part in text.split():
        year, number = part.split("-", 1) if not part.startswith("-") else (year, part[1:])
        found.append(f"CVE-{year}-{number}")
    return tuple(found)


CLASSES = (
    AdvisoryClass(
        "a prefix hash collision returns the pages of another prompt",
        ("CVE-2025-25183", "GHSA-rm76-4mrf-v9r8", "vllm#29163", "vllm#54727"),
        (
            "kv_cache/test_pool.py::test_match_with_equal_keys_and_different_tokens_misses",
            "security/test_forbidden_code.py::test_source_has_no_forbidden_construct",
        ),
    ),
    AdvisoryClass(
        "cached pages of another tenant are visible in timing or in usage",
        ("CVE-2025-46570", "GHSA-4qjh-9fv9-r85r"),
        (
            "kv_cache/test_page_hash.py::test_match_10_000_probes_find_no_foreign_page",
            "gateway/test_tenants.py::test_undeclared_system_prompt_is_not_shared",
        ),
    ),
    AdvisoryClass(
        "a salt or cache key chosen by the client",
        ("CVE-2026-105756", "CVE-2026-111392", "CVE-2026-105754", "PYSEC-2026-4198"),
        (
            "security/test_regressions.py::test_no_request_field_names_a_page_a_hash_or_a_namespace",
            "security/test_regressions.py::test_unsupported_dangerous_field_is_refused_by_name",
            "gateway/test_tenants.py::test_request_fields_cannot_make_tokens_public",
        ),
    ),
    AdvisoryClass(
        "state of one row reaches another row, or an error of one request ends the engine",
        (
            *("GHSA-v97p-wpxp-px84", "CVE-2026-114049", "CVE-2026-93840", "GHSA-fpch-3xrf-7q96"),
            *("CVE-2026-105757", "PYSEC-2026-4353"),
        ),
        (
            "security/test_adversarial_load.py::test_adversarial_requests_change_no_reference_result",
            "security/test_adversarial_load.py::test_adversarial_requests_with_a_real_network_change_no_reference_result",
            "engine/test_invalid_results.py::test_a_result_of_the_wrong_shape_fails_the_requests_of_its_step",
        ),
    ),
    AdvisoryClass(
        "log-probabilities of cached prompt tokens are uninitialised memory",
        ("CVE-2026-116180",),
        ("engine/test_prompt_logprobs.py::test_prompt_logprobs_with_any_cached_prefix_and_chunks_are_exact",),
    ),
    AdvisoryClass(
        "NaN or infinite logits become noise and poison the cache",
        ("sglang#33187", "sglang#33206", "sglang#33263", "vllm#50283", "tokenspeed#434"),
        (
            "engine/test_invalid_results.py::test_one_corrupted_row_of_thirty_two_fails_that_request_only",
            "security/test_non_finite_logits.py::test_non_finite_row_fails_its_request_only",
        ),
    ),
    AdvisoryClass(
        "a cancelled command leaves its reply to the next user of the connection",
        _cves("2023-28858 -28859"),
        ("storage/test_redis.py::test_cancelled_callers_leave_no_replies_on_connections",),
    ),
    AdvisoryClass(
        "permissions checked only once, or an id accepted as permission",
        _cves("2026-44553 -44564 -59216 -111630 2024-41703"),
        (
            "gateway/test_tenants.py::test_tenant_cannot_read_stop_or_steer_foreign_responses",
            "gateway/test_guard.py::test_tenant_cannot_read_another_tenants_data",
            "gateway/test_guard.py::test_tenant_cannot_stop_another_tenants_response",
        ),
    ),
    AdvisoryClass(
        "pickle, cloudpickle or dill over a socket",
        _cves(
            "2024-9053 -11041 2025-29783 -32444 -30165 -47277 -59953 -66455 2026-3059 -14890 -86793 -93034 -93088 -7304"
        ),
        (
            "security/test_forbidden_code.py::test_source_has_no_forbidden_construct",
            "security/test_runtime.py::test_server_reads_no_pickle_connects_nowhere_and_listens_once",
            "engine_process/test_protocol.py::test_an_invalid_command_raises",
        ),
    ),
    AdvisoryClass(
        "an internal socket without authentication",
        ("CVE-2025-30202",),
        (
            "security/test_runtime.py::test_server_reads_no_pickle_connects_nowhere_and_listens_once",
            "deploy/test_compose.py::test_services_wait_for_redis_and_are_published_on_loopback_only",
        ),
    ),
    AdvisoryClass(
        "weights stored as a pickle",
        _cves("2025-24357 -32434 2026-24747 2024-11392 -11394 2025-14924"),
        ("security/test_model_folder.py::test_corrupted_folder_is_refused_with_the_file_name",),
    ),
    AdvisoryClass(
        "code or paths named by the files of a model",
        (*_cves("2026-22807 2025-66448"), "transformers weight_map"),
        (
            "security/test_model_folder.py::test_unneeded_code_in_the_folder_is_ignored",
            "security/test_model_folder.py::test_corrupted_folder_is_refused_with_the_file_name",
        ),
    ),
    AdvisoryClass(
        "a check written as an assert, removed by -O",
        ("CVE-2026-41523",),
        (
            "security/test_forbidden_code.py::test_injected_line_is_found",
            "security/test_runtime.py::test_server_reads_no_pickle_connects_nowhere_and_listens_once",
        ),
    ),
    AdvisoryClass(
        "a chat template escapes its sandbox, or has none",
        _cves("2026-5760 2024-56326 -56201 2025-27516"),
        (
            "security/test_model_folder.py::test_corrupted_folder_is_refused_with_the_file_name",
            "security/test_regressions.py::test_required_version_excludes_known_vulnerabilities",
        ),
    ),
    AdvisoryClass(
        "scripts in Redis",
        _cves("2025-49844 -46817 -46818 -46819"),
        ("storage/test_redis.py::test_redis_user_can_run_no_scripts_and_no_admin_commands",),
    ),
    AdvisoryClass(
        "state read from a file or from another machine without validation",
        _cves("2026-43629 -34159 -118375"),
        not_ours="keys and values are never read from a file or a network",
    ),
    AdvisoryClass(
        "network threads modify state of the engine",
        _cves("2026-43631 -43632"),
        ("test_architecture.py::test_layers_hold", "test_architecture.py::test_the_check_can_fail"),
    ),
    AdvisoryClass(
        "negative numbers",
        ("CVE-2026-21869",),
        ("gateway/test_bad_input.py::test_parameter_at_its_bound_is_accepted_and_beyond_it_refused",),
    ),
    AdvisoryClass(
        "unlimited number of candidates",
        _cves("2026-34756 2024-8939"),
        ("security/test_regressions.py::test_counts_over_the_limit_are_refused",),
    ),
    AdvisoryClass(
        "unlimited length of lists",
        _cves("2026-73559 -71486"),
        ("security/test_regressions.py::test_request_with_too_many_items_is_refused",),
    ),
    AdvisoryClass(
        "a rule across fields that null bypasses, or that one endpoint does not check",
        _cves("2026-114051 -116173"),
        (
            "security/test_regressions.py::test_random_fields_with_nulls_are_answered",
            "engine/test_admission.py::test_add_of_an_invalid_request_raises",
        ),
    ),
    AdvisoryClass(
        "grammars that compile without limit, or are cached without limit",
        (
            *_cves("2026-55574 2025-29770 -32381 -69872"),
            *("PYSEC-2026-3933", "GHSA-389x-67px-mjg3", "GHSA-hf3c-wxg2-49q9"),
        ),
        (
            "decoding/test_grammar_limits.py::test_a_compile_that_takes_too_long_is_stopped",
            "decoding/test_grammar_limits.py::test_a_compile_that_takes_too_much_memory_is_stopped",
            "decoding/test_grammar_limits.py::test_endless_new_schemas_take_no_more_memory",
        ),
    ),
    AdvisoryClass(
        "a template, or its variables, in the request",
        (*_cves("2025-62426 2026-115911 -115918"), "PYSEC-2026-2013"),
        ("security/test_regressions.py::test_unsupported_dangerous_field_is_refused_by_name",),
    ),
    AdvisoryClass(
        "tensors in the request",
        _cves("2025-62164 2026-56340 -73557"),
        ("security/test_regressions.py::test_unsupported_dangerous_field_is_refused_by_name",),
    ),
    AdvisoryClass(
        "compressed data that expands to a large size",
        _cves("2026-54233 -100650 -109225 -109229"),
        (
            "security/test_regressions.py::test_compressed_bodies_are_refused_unread",
            "security/test_regressions.py::test_websocket_compression_is_refused",
            "gateway/test_guard.py::test_body_limit_counts_bytes_while_reading",
        ),
    ),
    AdvisoryClass(
        "a request head of unlimited length",
        ("CVE-2025-48956",),
        (
            "gateway/test_uvicorn_limits.py::test_head_at_the_limit_and_longer_body_are_accepted",
            "gateway/test_uvicorn_limits.py::test_head_over_the_limit_is_refused_with_431",
        ),
    ),
    AdvisoryClass(
        "a tokenizer that panics, which `except Exception` does not catch",
        ("pyo3 PanicException",),
        (
            "security/test_regressions.py::test_tokenizer_panic_fails_the_request_only",
            "decoding/test_grammar_limits.py::test_a_library_that_panics_ends_the_request",
        ),
    ),
    AdvisoryClass(
        "text cut inside a character",
        ("vllm#44620", "vllm#17448", "vllm#48853", "rapid-mlx#730"),
        (
            "tokenizer/test_detokenizer.py::test_every_split_point",
            "tokenizer/test_detokenizer.py::test_behind_a_prompt_the_text_is_what_the_prompt_lacks",
            "gateway/test_json_codec.py::test_invalid_json_over_http_and_websocket_is_refused",
        ),
    ),
    AdvisoryClass(
        "events of a request that has ended, or whose id is used twice",
        (
            *("lmcache#4185", "vllm#25991", "vllm#42157", "vllm#10583", "vllm#15041", "vllm#27987"),
            *("CVE-2026-94627", "CVE-2026-112266"),
        ),
        (
            "engine_process/test_clients.py::test_abort_of_an_unknown_id_is_ignored_and_events_raise",
            "engine_process/test_clients.py::test_submit_of_an_id_in_use_raises",
            "security/test_regressions.py::test_equal_client_chosen_ids_make_separate_requests",
            "security/test_regressions.py::test_prefix_of_an_id_is_not_found",
        ),
    ),
    AdvisoryClass(
        "a reply without tokens",
        ("vllm#52693",),
        ("security/test_regressions.py::test_engine_reply_without_text_finishes",),
    ),
    AdvisoryClass(
        "a Host header that changes the path, unlimited ranges or form fields",
        (*_cves("2026-48710 -48746 2025-62727 2023-30798"), "PYSEC-2026-248"),
        (
            "gateway/test_guard.py::test_foreign_host_is_rejected",
            "security/test_forbidden_code.py::test_source_has_no_forbidden_construct",
            "security/test_regressions.py::test_many_byte_ranges_are_ignored",
            "security/test_regressions.py::test_required_version_excludes_known_vulnerabilities",
        ),
    ),
    AdvisoryClass(
        "comparison of keys in variable time, or authentication on some routes only",
        ("CVE-2025-59425",),
        ("gateway/test_guard.py::test_api_key_is_required",),
    ),
    AdvisoryClass(
        "any web page can use a server on the same machine",
        (*_cves("2026-44211 2024-28224"), "GHSA-5jx5-hqx5-2vrj"),
        (
            "gateway/test_guard.py::test_foreign_origin_is_rejected",
            "gateway/test_guard.py::test_foreign_host_is_rejected",
        ),
    ),
    AdvisoryClass(
        "model output that becomes a protocol event",
        ("GHSA-22cc-p3c6-wpvm", "CVE-2025-64496"),
        ("contracts/test_sse_framing_matrix.py::test_every_parser_reads_every_event",),
    ),
    AdvisoryClass(
        "model output that becomes HTML or script in the page",
        _cves("2026-70492 -109288 -45314 -109286"),
        (
            "e2e/test_page_injection.py::test_stored_malicious_text_stays_text",
            "e2e/test_page_injection.py::test_streamed_malicious_text_stays_text",
            "e2e/test_page_safety.py::test_policy_is_sent_and_the_page_obeys_it",
        ),
    ),
    AdvisoryClass(
        "the server fetches URLs of a request",
        _cves("2026-45400 -45331 2025-69222"),
        (
            "security/test_regressions.py::test_urls_of_a_request_are_not_fetched",
            "security/test_runtime.py::test_server_reads_no_pickle_connects_nowhere_and_listens_once",
        ),
    ),
)

# Advisories of these kinds published until November 2026; the classes above must contain each of them.
KNOWN = frozenset(
    (
        *_cves(
            "2023-28858 -28859 -30798 2024-8939 -9053 -11041 -11392 -11394 -28224 -41703 -56201 -56326 "
            "2025-14924 -24357 -25183 -27516 -29770 -29783 -30165 -30202 -32381 -32434 -32444 -46570 -46817 "
            "-46818 -46819 -47277 -48956 -49844 -59425 -59953 -62164 -62426 -62727 -64496 -66448 -66455 -69222 "
            "-69872 2026-3059 -5760 -7304 -14890 -21869 -22807 -24747 -34159 -34756 -41523 -43629 -43631 "
            "-43632 -44211 -44553 -44564 -45314 -45331 -45400 -48710 -48746 -54233 -55574 -56340 -59216 -70492 "
            "-71486 -73557 -73559 -86793 -93034 -93088 -93840 -94627 -100650 -105754 -105756 -105757 -109225 "
            "-109229 -109286 -109288 -111392 -111630 -112266 -114049 -114051 -115911 -115918 -116173 -116180 "
            "-118375"
        ),
        *("GHSA-22cc-p3c6-wpvm", "GHSA-389x-67px-mjg3", "GHSA-4qjh-9fv9-r85r", "GHSA-5jx5-hqx5-2vrj"),
        *("GHSA-fpch-3xrf-7q96", "GHSA-hf3c-wxg2-49q9", "GHSA-rm76-4mrf-v9r8", "GHSA-v97p-wpxp-px84"),
        *("PYSEC-2026-248", "PYSEC-2026-2013", "PYSEC-2026-3933", "PYSEC-2026-4198", "PYSEC-2026-4353"),
    )
)
