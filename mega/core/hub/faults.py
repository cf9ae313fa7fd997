"""What the Hub, or the way to it, answers instead of files: one line that names the repository and what helps."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from mega.core.hub.names import HubName


def needs_library() -> ValueError:
    return ValueError("needs huggingface_hub; pip install '.[hub]' in a clone")


@contextlib.contextmanager
def explained(flag: str, name: HubName) -> Iterator[None]:
    """Errors: ValueError for what the user can change, OSError for what the network or the disk did."""
    from huggingface_hub import constants, errors

    where, what = constants.ENDPOINT, f"{flag} {name}"
    try:
        yield
    except errors.GatedRepoError:
        raise ValueError(
            f"{what}: access is granted on its page at {where}/{name.repository}; then give HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{what}: has no revision {name.revision or 'main'}: no such branch, tag or commit") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"{what}: no such directory, and no such repository at {where}; a private one needs HF_TOKEN, or "
            "hf auth login"
        ) from None
    except errors.EntryNotFoundError as error:
        raise ValueError(f"{what}: {_line(error)}") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ValueError(
                f"{what}: {where} refuses the token (HTTP {status}); see HF_TOKEN, or hf auth login"
            ) from None
        raise OSError(f"{what}: {where} answers HTTP {status}: {_line(error)}") from None
    except errors.HTTPError as error:
        raise OSError(f"{what}: {where} cannot be reached: {_line(error)}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            kept = "what has come is kept, and the same command fetches the rest"
            raise OSError(
                error.errno, f"{error.strerror}: {what} needs more room in {constants.HF_HUB_CACHE} ({kept})"
            ) from None
        raise


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
