"""Convert errors from the Hub and the network into one-line messages that name the repository and a remedy."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from mega.core.hub.names import HubName


def needs_library() -> ValueError:
    return ValueError("needs huggingface_hub; pip install '.[hub]' in a clone")


@contextlib.contextmanager
def explained(flag: str, name: HubName) -> Iterator[None]:
    """Convert errors raised in the `with` block: ValueError for errors that the user can correct, OSError for network
    or disk errors."""
    from huggingface_hub import constants, errors

    endpoint, subject = constants.ENDPOINT, f"{flag} {name}"
    try:
        yield
    # GatedRepoError must be tested first, because it is a subclass of RepositoryNotFoundError.
    except errors.GatedRepoError:
        raise ValueError(
            f"{subject}: access is granted on its page at {endpoint}/{name.repository}; then give HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(
            f"{subject}: has no revision {name.revision or 'main'}: no such branch, tag or commit"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"{subject}: no such directory, and no such repository at {endpoint}; a private one needs HF_TOKEN, or "
            "hf auth login"
        ) from None
    except errors.EntryNotFoundError as error:
        raise ValueError(f"{subject}: {_line(error)}") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ValueError(
                f"{subject}: {endpoint} refuses the token (HTTP {status}); see HF_TOKEN, or hf auth login"
            ) from None
        raise OSError(f"{subject}: {endpoint} answers HTTP {status}: {_line(error)}") from None
    except errors.HTTPError as error:
        raise OSError(f"{subject}: {endpoint} cannot be reached: {_line(error)}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "what has come is kept, and the same command fetches the rest"
            raise OSError(
                error.errno, f"{error.strerror}: {subject} needs more room in {constants.HF_HUB_CACHE} ({hint})"
            ) from None
        raise


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
