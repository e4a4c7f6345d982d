# RAGGED_ATTENTION_COMMIT: the commit that is built, with "-dirty" where tracked files differ from it. It travels in the
# wheel, so that a result can name what was measured. A source archive has no .git: pass it, or it is "unknown".
if(NOT DEFINED RAGGED_ATTENTION_COMMIT AND DEFINED ENV{RAGGED_ATTENTION_COMMIT})
  set(RAGGED_ATTENTION_COMMIT "$ENV{RAGGED_ATTENTION_COMMIT}")
endif()
if(NOT DEFINED RAGGED_ATTENTION_COMMIT)
  set(RAGGED_ATTENTION_COMMIT "unknown")
  find_package(Git QUIET)
  if(Git_FOUND AND EXISTS "${CMAKE_SOURCE_DIR}/.git")
    execute_process(COMMAND "${GIT_EXECUTABLE}" -C "${CMAKE_SOURCE_DIR}" describe --always --abbrev=40 --dirty --exclude=*
                    OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      set(RAGGED_ATTENTION_COMMIT "${described}")
    endif()
  endif()
endif()
message(STATUS "ragged_attention: commit ${RAGGED_ATTENTION_COMMIT}")
