"""Asks a Hugging Face hub what a model holds, and reads bytes of its files. No torch.

Requests go through huggingface_hub's session: its proxies, certificates, tokens and offline switch
hold here too. Every fault becomes one sentence; `LostConnectionError` is the one that may pass.
"""

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from oled_moe import __version__
from oled_moe.errors import (
    ConfigError,
    DownloadError,
    MissingDependencyError,
    ModelNotFoundError,
    OledMoeError,
    ServerNotFoundError,
)
from oled_moe.hub_cache import check_revision, is_hub_id

# From here on its session is one of httpx2.
_MIN_VERSION = 2
_CONNECT_TIMEOUT_S = 5.0
_PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class LostConnectionError(DownloadError):
    """No bytes come now, and may come if asked again; `wait_s` is how long the hub says to wait."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the hub lists it; `checksum` is its sha256, or git's sha1 of a small file."""

    name: str
    num_bytes: int
    checksum: str


class HubClient:
    """One hub, and who asks it. `token` None is the one that huggingface_hub finds.

    `timeout_s` is how long to wait for the next bytes; None is huggingface_hub's.
    Raises: MissingDependencyError without huggingface_hub; ConfigError for what is no token.
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        token: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        _require_package()
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # lazily

        if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
            raise ConfigError("token is empty or has letters that no token has; copy it again")
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._token = token
        self._timeout_s = timeout_s or constants.HF_HUB_DOWNLOAD_TIMEOUT
        self._api = huggingface_hub.HfApi(endpoint=self.endpoint, token=token)
        self._headers = build_hf_headers(
            token=token, library_name="oled-moe", library_version=__version__
        )

    @property
    def is_offline(self) -> bool:
        """Whether HF_HUB_OFFLINE forbids all requests."""
        from huggingface_hub import is_offline_mode

        return bool(is_offline_mode())

    def list_files(self, name: str, revision: str) -> tuple[str, list[HubFile]]:
        """The commit that a revision of a model is, and all files in it.

        Raises: ConfigError for what cannot be a name; ModelNotFoundError, ServerNotFoundError;
        LostConnectionError where the hub says to ask again.
        """
        import httpx2

        if not is_hub_id(name):
            raise ConfigError(
                f"model is {name!r}; allowed: the id of a model on the hub, ORG/NAME, as it stands "
                f"behind {self.endpoint}/"
            )
        check_revision(revision)
        try:
            answer = self._api.model_info(
                name, revision=revision, files_metadata=True, timeout=self._timeout_s
            )
            return _read_listing(answer)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from None
        except (httpx2.HTTPError, OSError) as error:
            raise self._explain(error, name, revision) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerNotFoundError(
                f"what answers at {self.endpoint} is no hub ({type(error).__name__}: "
                f"{error}); check HF_ENDPOINT and the network's proxy"
            ) from None

    @contextmanager
    def read(
        self, name: str, commit: str, file: HubFile, start: int
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Bytes of a file from `start` on, or from the first on: which of both comes first.

        Raises: LostConnectionError, also while bytes are taken; ModelNotFoundError.
        """
        import httpx2
        from huggingface_hub import get_session
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

        # Compressed bytes could not be continued where they broke off.
        headers = {**self._headers, "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        url = f"{self.endpoint}/{name}/resolve/{commit}/{file.name}"
        timeout = httpx2.Timeout(self._timeout_s, connect=_CONNECT_TIMEOUT_S)
        try:
            with get_session().stream(
                "GET", url, headers=headers, timeout=timeout, follow_redirects=True
            ) as response:
                if response.status_code == 416:
                    # No such range here: whatever has come so far is of another file.
                    yield 0, iter(())
                    return
                hf_raise_for_status(response)
                yield _first_byte(response), response.iter_bytes()
        except httpx2.TransportError as error:
            raise LostConnectionError(_reason(error)) from None
        except httpx2.HTTPError as error:
            raise self._explain(error, name, commit, file.name) from None

    def _unreachable(self, error: Exception) -> OledMoeError:
        return ServerNotFoundError(
            f"the hub at {self.endpoint} cannot be reached ({_reason(error)}); check the network "
            "and HF_ENDPOINT"
        )

    def _explain(
        self, error: Exception, name: str, revision: str, file_name: str | None = None
    ) -> OledMoeError:
        """The sentence for what the hub answered instead."""
        from huggingface_hub import errors

        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.OfflineModeIsEnabled):
            return ServerNotFoundError(
                f"HF_HUB_OFFLINE is set, so {name} is not downloaded; unset it to do so"
            )
        # Of its many kinds, those of repositories come first: gated is one of not found.
        if isinstance(error, errors.GatedRepoError):
            return ModelNotFoundError(self._gated(name))
        if isinstance(error, errors.RevisionNotFoundError):
            return ModelNotFoundError(
                f"{name} has no revision {revision!r}; the branches and tags it has are listed at "
                f"{self.endpoint}/{name}/tree/main"
            )
        if isinstance(error, errors.DisabledRepoError):
            return ModelNotFoundError(
                f"{name} has been disabled on {self.endpoint}; nobody can download it"
            )
        if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
            return ModelNotFoundError(self._not_for_you(name, status))
        if status == 404:
            return ModelNotFoundError(
                f"{self.endpoint} has no {file_name or 'model'} in {name} at {revision}; "
                "check the spelling"
            )
        if status in _PASSING_STATUS:
            return LostConnectionError(
                f"{self.endpoint} answers with status {status}",
                _retry_after_s(error),
            )
        if status is not None:
            return DownloadError(
                f"{self.endpoint} answers the request for {file_name or name} with status "
                f"{status}; try again later"
            )
        return DownloadError(f"{self.endpoint}: {_reason(error)}; try again later")

    @property
    def _has_token(self) -> bool:
        return "authorization" in self._headers

    def _gated(self, name: str) -> str:
        page = f"{self.endpoint}/{name}"
        if self._has_token:
            return (
                f"{name} is gated, and the account of the token that was sent may not read it: "
                f"accept the terms at {page}, or wait until its owner has granted access"
            )
        return (
            f"{name} is gated: accept the terms at {page}, then give a token of that account, made "
            f"at {self.endpoint}/settings/tokens, in HF_TOKEN or with --token"
        )

    def _not_for_you(self, name: str, status: int | None) -> str:
        tokens = f"{self.endpoint}/settings/tokens"
        if self._has_token:
            return (
                f"{name} is not on {self.endpoint}, or the token that was sent is not valid or may "
                f"not read it (status {status}); check the spelling, and the token at {tokens}"
            )
        return (
            f"{name} is not on {self.endpoint}, or is private (status {status}); check the "
            f"spelling, or give a token that may read it, made at {tokens}, in HF_TOKEN or with "
            "--token"
        )


def _require_package() -> None:
    """Raises: MissingDependencyError that names the extra."""
    remedy = "install it with: pip install 'oled-moe[hub]'"
    try:
        version = importlib.metadata.version("huggingface_hub")
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependencyError(
            f"downloads need the package huggingface_hub, which is not installed; {remedy}"
        ) from None
    if int(version.split(".")[0]) < _MIN_VERSION:
        raise MissingDependencyError(
            f"downloads need huggingface_hub {_MIN_VERSION}.0 or newer, {version} is installed; "
            f"{remedy}"
        )


def _read_listing(answer: Any) -> tuple[str, list[HubFile]]:
    """Raises: ValueError for what could not be a commit and its files."""
    commit = answer.sha
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ValueError(f"the commit is {commit!r}")
    return commit, [_read_file(sibling) for sibling in answer.siblings or ()]


def _read_file(sibling: Any) -> HubFile:
    name, num_bytes, checksum = sibling.rfilename, sibling.size, sibling.blob_id
    if sibling.lfs is not None:
        num_bytes, checksum = sibling.lfs.size, sibling.lfs.sha256
    # They become names of files here.
    if not isinstance(checksum, str) or not _CHECKSUM.fullmatch(checksum):
        raise ValueError(f"{name!r:.200} has the checksum {checksum!r:.200}")
    if type(num_bytes) is not int or num_bytes < 0:
        raise ValueError(f"{name!r:.200} has the size {num_bytes!r:.200}")
    return HubFile(str(name), num_bytes, checksum)


def _first_byte(response: Any) -> int:
    """Which byte of the file a reply begins with."""
    if response.status_code != 206:
        return 0
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else 0


def _retry_after_s(error: Exception) -> float:
    response = getattr(error, "response", None)
    text = response.headers.get("Retry-After", "") if response is not None else ""
    return float(text) if text.isdecimal() else 0.0


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
